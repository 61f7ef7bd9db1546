"""Sends the heartbeats of one service instance."""

import asyncio
import os
import time
from collections.abc import Callable

import msgspec
import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import MEMORY, Heartbeat
from pagewire.shared.process.context import Service
from pagewire.shared.process.linux_process import resident_bytes

INTERVAL = 0.5
"""Seconds between two heartbeats."""
ANSWER_DELAY = 0.01
"""Seconds from a request for a heartbeat to its answer: one heartbeat answers all requests that come meanwhile."""
LOST_AFTER = 60.0
"""Seconds without a broker after which the service gives up."""

_log = structlog.get_logger()


class Heartbeater:
    """Publishes a service's heartbeat twice a second, and at once on `announce` and when somebody asks for it."""

    def __init__(
        self, bus: Bus, name: str, instance: str, model: str = "", problem: Callable[[], str] = lambda: ""
    ) -> None:
        """`model`: token of the served model in subjects; empty: all. `problem` returns the `Heartbeat.problem` of a
        service that has none of its own."""
        self._bus = bus
        self._problem = problem
        self._model = model
        self._subject = f"{subjects.HEARTBEAT}.{name}.{instance}"
        self._service: Service | None = None
        self._draining = False
        self._answer_timer: asyncio.TimerHandle | None = None
        """Timer that answers requests for a heartbeat; None without one."""

    def drain(self) -> None:
        """Has the heartbeats say that the service drains, and sends one at once."""
        self._draining = True
        self.announce()

    def beat_of(self, service: Service) -> Heartbeat:
        """Returns the current heartbeat of the service. A service that drains is not ready."""
        beat = service.heartbeat()
        load = {MEMORY: float(resident_bytes(os.getpid())), **beat.load}
        problem = beat.problem or self._problem()
        beat = msgspec.structs.replace(beat, model=self._model, load=load, problem=problem)
        return msgspec.structs.replace(beat, ready=False, draining=True) if self._draining else beat

    def announce(self) -> None:
        """Sends a heartbeat now; does nothing before `run`, while the service is still being created."""
        if self._service is None:
            return
        try:
            self._bus.publish(self._subject, encode(self.beat_of(self._service)))
        except BusUnavailable:
            _log.debug("heartbeat_not_sent")

    async def run(self, service: Service) -> None:
        """Sends heartbeats until cancelled.

        Raises:
            BusUnavailable: there was no broker for `LOST_AFTER` seconds.
        """
        self._service = service
        self._bus.on_reconnect(self.announce)  # others may have missed heartbeats
        requests = await self._bus.subscribe(subjects.ANNOUNCE, self._on_request)
        try:
            await self._repeat()
        finally:
            await requests.unsubscribe()
            if self._answer_timer is not None:
                self._answer_timer.cancel()

    async def _repeat(self) -> None:
        connected_at = time.monotonic()
        while True:
            self.announce()
            now = time.monotonic()
            if self._bus.connected:
                connected_at = now
            elif now - connected_at > LOST_AFTER:
                raise BusUnavailable(f"there was no broker for {LOST_AFTER:.0f} s: check that it runs at --nats-url")
            await asyncio.sleep(INTERVAL)

    def _on_request(self, _: Message) -> None:
        if self._answer_timer is None:
            self._answer_timer = asyncio.get_running_loop().call_later(ANSWER_DELAY, self._answer)

    def _answer(self) -> None:
        self._answer_timer = None
        self.announce()
