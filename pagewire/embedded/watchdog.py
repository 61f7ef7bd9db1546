"""Observes the heartbeats of a supervisor's services: whether all are ready, and whether one is frozen."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError, NoResponders, RequestTimeout, Unavailable
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process.peers import SILENCE, Peers

START_TIMEOUT = 300.0
"""Seconds within which all services must be ready; loading a large model takes long."""
PING_TIMEOUT = 1.0
"""Seconds within which a service without heartbeats must answer a ping."""
RECONNECT_TIMEOUT = 10.0
"""Seconds within which a service without heartbeats must connect again: one that is not frozen takes far less."""
CHECK_INTERVAL = 0.5
"""Seconds between two checks."""
STARVED_SHARE = 0.5
"""Share of the time between two checks in which a service without a heartbeat must have waited for a core to count as
starved: a service that has the cores sends its heartbeats, and one that is stopped waits for nothing."""

_log = structlog.get_logger()


class Programs(Protocol):
    """The programs of a supervisor, which the watchdog observes and kills, each by its name."""

    @property
    def instances(self) -> Mapping[str, str]:
        """The current instance id of each program, by the program's name."""

    def kill(self, name: str) -> None:
        """Kills a program."""

    def replace(self, name: str, instance: str) -> None:
        """Called when a program's heartbeat says that it drains."""

    def seconds_without_core(self, name: str) -> float:
        """Returns for how many seconds the threads of a program have waited for a core since it started."""

    def cpu_seconds(self, name: str) -> float:
        """Returns for how many seconds a program has computed since it started."""


class _LastBeat(NamedTuple):
    """The last heartbeat that a program has sent itself."""

    beat: Heartbeat
    at: float
    """When it arrived, on the monotonic clock."""


class _CoreWait(NamedTuple):
    """How long a silent program has waited for a core."""

    total: float
    """Seconds since the program started, for all its threads together, as of the last check."""
    seconds: float
    """Seconds of its silence in which threads have waited, from the second check on."""


class _Computing(NamedTuple):
    """Progress of a program that is not ready yet."""

    cpu_seconds: float
    """Seconds for which it has computed since it started."""
    at: float
    """When that number last grew, on the monotonic clock."""


class Watchdog:
    """Kills a service that has been silent for `SILENCE` seconds and does not answer a ping.

    The time in which a thread of a service waits for a core is no silence: a service that computes on a starved machine
    lives, and so that others know it, its last heartbeat is sent again in its place. All threads count, since the one
    that sends heartbeats may wait for a lock of another one, such as the interpreter's. Nor is a service silent that is
    not ready and computes: it may read a large vocabulary in one call that lets no other thread run. A service without
    a connection has `RECONNECT_TIMEOUT` seconds: when the broker restarts, a frozen service does not connect again.

    Args:
        bus: a connection with the rights of a client.
        programs: the programs of the supervisor.
    """

    def __init__(self, bus: Bus, programs: Programs) -> None:
        self._bus = bus
        self._programs = programs
        self._heartbeat_arrived = asyncio.Event()
        self._peers = Peers(bus)
        self._last_beats: dict[str, _LastBeat] = {}
        """By instance; a heartbeat that is sent in the place of an instance does not count."""
        self._core_waits: dict[str, _CoreWait] = {}
        """Waits of the silent programs for a core, by instance."""
        self._computing: dict[str, _Computing] = {}
        """Progress of the programs that are not ready, by instance."""
        self._connected_at = time.monotonic()
        bus.on_reconnect(self._on_reconnect)

    async def listen(self) -> None:
        """Subscribes to heartbeats."""
        await self._peers.listen(on_change=self._on_heartbeat)

    async def until_ready(
        self, programs: Iterable[str], failure: asyncio.Future[None], since: float = 0.0
    ) -> dict[str, dict[str, float]]:
        """Waits until programs are ready, as `all_ready` does. Raises the exception of `failure`, if it has one.

        Raises:
            Unavailable: they were not ready within `START_TIMEOUT` seconds.
        """
        waiting = asyncio.create_task(self.all_ready(list(programs), since))
        try:
            either: set[asyncio.Future[Any]] = {waiting, failure}
            await asyncio.wait(either, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            if failure.done():
                failure.result()
            raise Unavailable(f"the stack was not ready within {START_TIMEOUT:.0f} s: see the log for the reason")
        finally:
            waiting.cancel()

    async def all_ready(self, programs: Iterable[str], since: float = 0.0) -> dict[str, dict[str, float]]:
        """Waits until every program is ready; returns the load that each reports, by name.

        Only heartbeats that arrive after `since`, on the monotonic clock, count.
        """
        while True:
            self._heartbeat_arrived.clear()
            lasts = {name: self._last(name) for name in programs}
            ready = {
                name: last.beat.load
                for name, last in lasts.items()
                if last is not None and last.beat.ready and last.at > since
            }
            if len(ready) == len(lasts):
                return ready
            await self._heartbeat_arrived.wait()

    def load(self, name: str) -> dict[str, float]:
        """Returns the load that a program has reported last; empty without a heartbeat."""
        last = self._last(name)
        return last.beat.load if last is not None else {}

    async def run(self) -> None:
        """Watches the programs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill_frozen())
            tasks.create_task(self._repeat_heartbeats())
            tasks.create_task(self._observe_progress())

    async def _kill_frozen(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            instances = set(self._programs.instances.values())
            self._peers.retain(instances)
            self._last_beats = {instance: last for instance, last in self._last_beats.items() if instance in instances}
            if self._bus.connected:
                for name, instance in list(self._programs.instances.items()):
                    if await self._is_frozen(name):
                        _log.error("service_frozen", program=name, instance=instance)
                        self._programs.kill(name)

    async def _repeat_heartbeats(self) -> None:
        """Sends the last heartbeat of each starved program again, as often as the program itself should send one."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            before, checked_at = checked_at, time.monotonic()
            waits, self._core_waits = self._core_waits, {}
            for name, instance in self._programs.instances.items():
                last = self._last(name)
                if last is None or checked_at - last.at <= CHECK_INTERVAL:
                    continue
                total = self._programs.seconds_without_core(name)
                wait = waits.get(instance, _CoreWait(total, 0.0))
                waited = min(max(0.0, total - wait.total), checked_at - before)  # threads wait side by side, and end
                self._core_waits[instance] = _CoreWait(total, wait.seconds + waited)
                if waited > STARVED_SHARE * (checked_at - before) and self._silence(name) <= SILENCE:
                    silence = round(checked_at - last.at, 1)
                    _log.info("service_starved", program=name, instance=instance, silent_s=silence)
                    self._repeat(last.beat)

    async def _observe_progress(self) -> None:
        """Notes when each program that is not ready has computed last."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            before, self._computing = self._computing, {}
            for name, instance in self._programs.instances.items():
                last = self._last(name)
                if last is None or last.beat.ready:
                    continue
                progress, cpu_seconds = before.get(instance), self._programs.cpu_seconds(name)
                if progress is None or cpu_seconds > progress.cpu_seconds:
                    progress = _Computing(cpu_seconds, time.monotonic())
                self._computing[instance] = progress

    def _repeat(self, beat: Heartbeat) -> None:
        try:
            data = encode(msgspec.structs.replace(beat, repeated=True))
            self._bus.publish(f"{subjects.HEARTBEAT}.{beat.service}.{beat.instance}", data)
        except BusError as error:
            _log.warning("heartbeat_not_repeated", instance=beat.instance, reason=str(error))

    def _on_reconnect(self) -> None:
        self._connected_at = time.monotonic()

    def _on_heartbeat(self) -> None:
        self._heartbeat_arrived.set()
        for name, instance in self._programs.instances.items():
            beat, _ = self._peers.last(instance)
            last = self._last_beats.get(instance)
            if beat is None or (last is not None and last.beat is beat):
                continue
            self._last_beats[instance] = _LastBeat(beat, time.monotonic())
            self._core_waits.pop(instance, None)
            if beat.draining:
                self._programs.replace(name, instance)

    def _last(self, name: str) -> _LastBeat | None:
        return self._last_beats.get(self._programs.instances.get(name, ""))

    def _silence(self, name: str) -> float:
        """Returns for how many seconds a program has said nothing though it did not wait for a core; of one that is not
        ready, for how many it has not computed either."""
        last = self._last(name)
        if last is None:
            return 0.0
        progress = self._computing.get(last.beat.instance)
        since = max(last.at, progress.at) if progress is not None else last.at
        wait = self._core_waits.get(last.beat.instance)
        return time.monotonic() - since - (wait.seconds if wait is not None else 0.0)

    async def _is_frozen(self, name: str) -> bool:
        """Returns whether a program neither sends heartbeats nor answers a ping.

        A program without a subscription to pings has ended, starts, or is disconnected, which lasts if it is frozen.
        """
        last = self._last(name)
        if last is None or self._silence(name) <= SILENCE:
            return False
        connection = self._bus.reconnections
        asked_at, core_wait = time.monotonic(), self._programs.seconds_without_core(name)
        subject = f"$SRV.PING.pagewire-{last.beat.service}.{last.beat.instance}"
        try:
            await self._bus.request(subject, b"", timeout=PING_TIMEOUT)
        except NoResponders:
            without_connection = min(self._silence(name), time.monotonic() - self._connected_at)
            return without_connection > RECONNECT_TIMEOUT and self._last(name) is last
        except RequestTimeout:
            starved = self._programs.seconds_without_core(name) - core_wait
            if starved > STARVED_SHARE * (time.monotonic() - asked_at):
                return False
            connected = await self._is_connected() and self._bus.reconnections == connection  # the ping was not lost
            return connected and self._last(name) is last
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
