"""Observes the heartbeats of a supervisor's services: whether all are ready, and whether one is frozen."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import structlog

from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError, NoResponders, RequestTimeout
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process.peers import SILENCE, Peers

PING_TIMEOUT = 1.0
"""Seconds within which a service without heartbeats must answer a ping."""
RECONNECT_TIMEOUT = 10.0
"""Seconds within which a service without heartbeats must connect again: one that is not frozen takes far less."""
CHECK_INTERVAL = 0.5
"""Seconds between two checks."""

_log = structlog.get_logger()


class Watchdog:
    """Kills a service that has sent no heartbeat for `SILENCE` seconds and does not answer a ping.

    A service without a connection has `RECONNECT_TIMEOUT` seconds: when the broker restarts, a frozen service does not
    connect again.

    Args:
        bus: a connection with the rights of a client.
        instances: the current instance id of each program, by the program's name.
        kill: kills a program by name.
        replace: called with name and instance id of a program whose heartbeat says that it drains.
    """

    def __init__(
        self,
        bus: Bus,
        instances: Mapping[str, str],
        kill: Callable[[str], None],
        replace: Callable[[str, str], None] = lambda name, instance: None,
    ) -> None:
        self._bus = bus
        self._instances = instances
        self._kill = kill
        self._replace = replace
        self._heartbeat_arrived = asyncio.Event()
        self._peers = Peers(bus)
        self._connected_at = time.monotonic()
        bus.on_reconnect(self._on_reconnect)

    async def listen(self) -> None:
        """Subscribes to heartbeats."""
        await self._peers.listen(on_change=self._on_heartbeat)

    async def all_ready(self, programs: Iterable[str], since: float = 0.0) -> dict[str, dict[str, float]]:
        """Waits until every program is ready; returns the load that each reports, by name.

        Only heartbeats that arrive after `since`, on the monotonic clock, count.
        """
        while True:
            self._heartbeat_arrived.clear()
            lasts = {name: self._last(name) for name in programs}
            oldest = time.monotonic() - since
            ready = {
                name: beat.load
                for name, (beat, age) in lasts.items()
                if beat is not None and beat.ready and age < oldest
            }
            if len(ready) == len(lasts):
                return ready
            await self._heartbeat_arrived.wait()

    def load(self, name: str) -> dict[str, float]:
        """Returns the load that a program has reported last; empty without a heartbeat."""
        beat, _ = self._last(name)
        return beat.load if beat is not None else {}

    async def run(self) -> None:
        """Checks the programs until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            self._peers.retain(self._instances.values())
            if self._bus.connected:
                for name, instance in list(self._instances.items()):
                    if await self._is_frozen(name):
                        _log.error("service_frozen", program=name, instance=instance)
                        self._kill(name)

    def _on_reconnect(self) -> None:
        self._connected_at = time.monotonic()

    def _on_heartbeat(self) -> None:
        self._heartbeat_arrived.set()
        for name, instance in self._instances.items():
            beat = self._peers.find(instance)
            if beat is not None and beat.draining:
                self._replace(name, instance)

    def _last(self, name: str) -> tuple[Heartbeat | None, float]:
        return self._peers.last(self._instances.get(name, ""))

    async def _is_frozen(self, name: str) -> bool:
        """Returns whether a program neither sends heartbeats nor answers a ping.

        A program without a subscription to pings has ended, starts, or is disconnected, which lasts if it is frozen.
        """
        beat, age = self._last(name)
        if beat is None or age <= SILENCE:
            return False
        connection = self._bus.reconnections
        try:
            await self._bus.request(f"$SRV.PING.pagewire-{beat.service}.{beat.instance}", b"", timeout=PING_TIMEOUT)
        except NoResponders:
            waited = min(age, time.monotonic() - self._connected_at)
            return waited > RECONNECT_TIMEOUT and self._last(name)[0] is beat
        except RequestTimeout:
            connected = await self._is_connected() and self._bus.reconnections == connection  # the ping was not lost
            return connected and self._last(name)[0] is beat
        except BusError:
            return False
        return False

    async def _is_connected(self) -> bool:
        """Returns whether the broker answers: a frozen one makes all services look frozen."""
        try:
            await self._bus.flush(timeout=PING_TIMEOUT)
        except BusError:
            return False
        return True
