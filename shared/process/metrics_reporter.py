"""Reports the metrics of one service instance to the gateway, over the bus, and to the OTLP push."""

import os
import resource
import time
from collections.abc import Iterator

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import UNLOADED
from pagewire.shared.messages.metrics import MetricsReport
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample
from pagewire.shared.models import model_folder
from pagewire.shared.process.clock_monitor import ClockMonitor
from pagewire.shared.process.context import Service
from pagewire.shared.process.heartbeater import Heartbeater
from pagewire.shared.process.linux_process import resident_bytes
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import tracing


class Reporter:
    """Collects the values of a service and of its process."""

    def __init__(
        self, bus: Bus, settings: Settings, heartbeater: Heartbeater, service: Service, clock: ClockMonitor | None
    ) -> None:
        """`clock`: compares the clocks; None for a service that keeps no deadlines."""
        self._bus = bus
        self._clock = clock
        self._model = model_folder.served_name(settings)
        self._heartbeater = heartbeater
        self._service = service
        self._started = time.time()

    async def listen(self) -> None:
        """Answers on the bus from now on."""
        await self._bus.subscribe(subjects.METRICS, self._on_request)

    def report(self) -> MetricsReport:
        """Returns all values as they are now."""
        beat = self._heartbeater.beat_of(self._service)
        samples = [
            table.READY.sample(float(beat.ready or bool(beat.load.get(UNLOADED)))),
            table.DRAINING.sample(float(beat.draining)),
            *self._of_process(),
            *(self._clock.metrics() if self._clock is not None else ()),
            *self._service.metrics(),
        ]
        return MetricsReport(beat.service, beat.instance, self._model, self._started, samples)

    def _of_process(self) -> Iterator[Sample]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        yield table.CPU_TIME.sample(usage.ru_utime + usage.ru_stime)
        if memory := resident_bytes(os.getpid()):
            yield table.MEMORY.sample(float(memory))
        yield table.RECONNECTS.sample(self._bus.reconnections)
        yield table.DROPPED_SPANS.sample(tracing.dropped_spans())

    def _on_request(self, message: Message) -> None:
        if subjects.is_client_inbox(message.reply):  # the gateway's: clients may not publish this subject
            self._bus.publish(message.reply, encode(self.report()))
