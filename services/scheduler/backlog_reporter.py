"""Reports to the tokenizers how many requests wait for the schedulers of a model, and how fast they start."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from pagewire.services.scheduler.request_manager import RequestManager
from pagewire.services.scheduler.service_meter import ServiceMeter
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.bus.protocol import QueueLengths
from pagewire.shared.errors import BusError
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.backlog import Backlog
from pagewire.shared.process.peers import SILENCE

SAMPLE_EVERY = 0.1
"""Seconds between two checks of the running sequences; without a request the checks go with the reports."""
REPORT_EVERY = 0.5
"""Seconds between two reports."""

_log = structlog.get_logger()
_backlog = Decoder(Backlog)


class BacklogReporter:
    """The reports of one scheduler.

    The queues belong to all schedulers of a model together, so only one of them counts the stored requests: the
    one with the lowest instance id among those that report.

    Attributes:
        queued: requests in the store that no scheduler has, by class; empty: another scheduler counts them.
        left: bytes that the store takes beside them.
    """

    def __init__(self, bus: Bus, model: str, instance: str, manager: RequestManager, meter: ServiceMeter) -> None:
        """`model` is the model's token in subjects."""
        self._bus = bus
        self._model = model
        self._instance = instance
        self._manager = manager
        self._meter = meter
        self._lower_until = 0.0
        """Monotonic time until which a scheduler with a lower id counts the stored requests."""
        self.queued: tuple[int, ...] = ()
        self.left = 0
        self._held: dict[str, tuple[tuple[int, ...], float]] = {}
        """Requests that each other scheduler has, by class, and the monotonic time of its report."""

    async def run(self) -> None:
        """Samples and reports until cancelled."""
        await self._bus.subscribe(f"{subjects.BACKLOG}.{self._model}.*", self._on_backlog)
        due = time.monotonic()
        while True:
            term, now = self._manager.term, time.monotonic()
            self._meter.sample(term.policy if term is not None else None, self._manager.requests.values(), now)
            if now >= due:
                due = now + REPORT_EVERY
                await self._report()
            await asyncio.sleep(SAMPLE_EVERY if self._manager.requests else REPORT_EVERY)

    async def _report(self) -> None:
        try:
            counts = time.monotonic() >= self._lower_until
            lengths = await self._bus.store.queue_lengths(subjects.all_work(self._model)) if counts else None
            report = self._describe(lengths)
            self._bus.publish(f"{subjects.BACKLOG}.{self._model}.{self._instance}", encode(report))
        except BusError as error:
            _log.debug("backlog_not_reported", reason=str(error))

    def _describe(self, lengths: QueueLengths | None) -> Backlog:
        term, meter = self._manager.term, self._meter
        started, held = [0] * len(subjects.CLASSES), [0] * len(subjects.CLASSES)
        for request in self._manager.requests.values():
            started[subjects.class_of(request.work.priority)] += not request.queued
            held[subjects.class_of(request.work.priority)] += 1
        stored = [0] * len(subjects.CLASSES)
        for queue, items in lengths.items.items() if lengths is not None else ():
            name = queue.split(".")[-2]
            if name in subjects.CLASSES:
                stored[subjects.CLASSES.index(name)] += items
        self._count_queued(stored if lengths is not None else (), held)
        self.left = lengths.left if lengths is not None else 0
        return Backlog(
            scheduler=self._instance,
            started=tuple(started),
            starts=meter.starts(time.monotonic()),
            rate=meter.rate() if term is not None else 0.0,
            free=meter.free(term.policy) if term is not None else 0.0,
            stored=tuple(stored) if lengths is not None else (),
            last=lengths.last if lengths is not None else 0,
            delay=meter.delay(),
            held=tuple(held),
        )

    def _count_queued(self, stored: Sequence[int], held: Sequence[int]) -> None:
        oldest = time.monotonic() - SILENCE
        self._held = {name: last for name, last in self._held.items() if last[1] > oldest}
        everywhere = [held, *(counts for counts, _ in self._held.values() if counts)]
        self.queued = tuple(max(0, stored[i] - sum(counts[i] for counts in everywhere)) for i in range(len(stored)))

    def _on_backlog(self, message: Message) -> None:
        report = _backlog.try_decode(message.data)
        if report is None or report.scheduler == self._instance:
            return
        self._held[report.scheduler] = report.held, time.monotonic()
        if report.scheduler < self._instance:
            self._lower_until = time.monotonic() + SILENCE
