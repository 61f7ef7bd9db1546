"""Hears the services of one supervisor: whether all are ready, and which of them is frozen."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import BusError, RequestTimeout, WireVersionError
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.peers import SILENCE

PING_WITHIN = 1.0
"""Seconds that a silent service has to answer a ping."""
LOOK_EVERY = 0.5

_heartbeat = Decoder(Heartbeat)
_log = structlog.get_logger()


class Watchdog:
    """Kills a service whose heart has stopped for `SILENCE` seconds and that answers no ping.

    Args:
        instances: the instance id that each program runs under at this moment.
        kill: ends a program by name.
    """

    def __init__(self, bus: Bus, instances: Mapping[str, str], kill: Callable[[str], None]) -> None:
        self._bus = bus
        self._instances = instances
        self._kill = kill
        self._heard: dict[str, tuple[float, Heartbeat]] = {}
        self._changed = asyncio.Event()

    async def listen(self) -> None:
        """Starts to hear."""
        await self._bus.subscribe(f"{subjects.HEARTBEAT}.*.*", self._hear)

    async def all_ready(self, programs: Iterable[str]) -> dict[str, dict[str, float]]:
        """Waits until each program says that it is ready; returns what they say of their load."""
        while True:
            self._changed.clear()
            ready = {name: beat.load for name in programs if (beat := self._last(name)) is not None and beat.ready}
            if all(name in ready for name in programs):
                return ready
            await self._changed.wait()

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            if self._bus.connected:
                for name, instance in list(self._instances.items()):
                    if self._is_silent(instance) and await self._is_frozen(name, instance):
                        _log.error("service_frozen", program=name, instance=instance)
                        self._kill(name)

    def _last(self, name: str) -> Heartbeat | None:
        heard = self._heard.get(self._instances.get(name, ""))
        return None if heard is None else heard[1]

    def _is_silent(self, instance: str) -> bool:
        """A service that is still starting has not been heard: it is not silent."""
        heard = self._heard.get(instance)
        return heard is not None and time.monotonic() - heard[0] > SILENCE

    async def _is_frozen(self, name: str, instance: str) -> bool:
        """Only a ping without an answer counts: where nobody subscribes, the process has gone or is not connected."""
        service = self._heard[instance][1].service
        try:
            await self._bus.request(f"$SRV.PING.pagewire-{service}.{instance}", b"", timeout=PING_WITHIN)
        except RequestTimeout:
            return self._is_silent(instance) and self._instances.get(name) == instance
        except BusError:
            return False
        return False

    def _hear(self, message: Message) -> None:
        try:
            beat = _heartbeat.decode(message.data)
        except (WireVersionError, msgspec.DecodeError):
            return  # not one of this supervisor's services
        if beat.instance not in self._instances.values():
            return
        self._heard = {name: heard for name, heard in self._heard.items() if name in self._instances.values()}
        self._heard[beat.instance] = (time.monotonic(), beat)
        self._changed.set()
