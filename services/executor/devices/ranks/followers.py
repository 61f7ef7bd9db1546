"""The processes of the ranks other than 0: rank 0 starts them, watches them, and ends with them."""

import os
import select
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from pagewire.services.executor.devices.protocol import AdapterSlots, Int64
from pagewire.services.executor.devices.ranks.adapters import LeadingAdapters
from pagewire.services.executor.devices.ranks.startup import Connection, Loaded, Ready, Start, fingerprint_of
from pagewire.services.executor.models.model import ModelCut
from pagewire.services.executor.rank_processes import RankProcesses
from pagewire.shared.errors import ConfigurationError, DeviceLost
from pagewire.shared.process.linux_process import seconds_without_core
from pagewire.shared.settings.config import Settings

T = TypeVar("T", bound=msgspec.Struct)

START_TIMEOUT = 120.0
"""Seconds that the other ranks may need for a stage of the start after rank 0 has ended its own, and as long again as
the start has taken."""
CLOSE_TIMEOUT = 2.0
"""Seconds within which a rank must end when it is told to."""
CHECK_INTERVAL = 0.1
"""Seconds between two checks of the heartbeats."""
SILENCE = 1.0
"""Seconds without a heartbeat after which a rank counts as lost; those in which it waits for a core do not count."""
_ENDED = select.POLLRDHUP | select.POLLHUP | select.POLLERR

_log = structlog.get_logger()


@dataclass
class _Follower:
    """A rank's process, as rank 0 sees it."""

    rank: int
    process: "subprocess.Popen[bytes]"
    connection: Connection
    adapters: Connection
    """The connection over which it gets its parts of adapters."""
    ready: bool = False
    """Whether it counts heartbeats."""
    heartbeats: int = 0
    """Heartbeats so far, at the last check."""
    core_wait: float = 0.0
    """Seconds for which its threads had waited for a core, at the last check."""
    silent: float = 0.0
    """Seconds without a heartbeat."""


class Followers(ABC):
    """All ranks other than 0.

    Attributes:
        lost: which rank has ended or is silent, so that none goes on; empty: all are there.
    """

    def __init__(self, started: RankProcesses, settings: Settings, folder: Path, threads: int) -> None:
        """Tells each of the processes what to load, and on how many threads."""
        self.lost = ""
        self._settings, self._folder = settings, folder
        self._descriptors = started.memory, started.store
        self._started = time.monotonic()
        self._watching: threading.Thread | None = None
        self._closing = False
        self._wakes: list[Callable[[], None]] = []
        self._all: list[_Follower] = []
        for rank, one in enumerate(started.processes, 1):
            self._all.append(_Follower(rank, one.process, Connection(one.end), Connection(one.adapters)))
            start = Start(settings, str(folder), rank, threads, *self._descriptors, one.adapters_descriptor)
            with suppress(OSError):  # a rank that has ended at once is noticed when it is awaited
                self._all[-1].connection.send(start)

    @abstractmethod
    def abort(self) -> None:
        """Ends all waits of this process for the other ranks. Any thread may call it."""

    @property
    def processes(self) -> list[int]:
        """Process ids, by rank."""
        return [follower.process.pid for follower in self._all]

    @property
    def connections(self) -> list[Connection]:
        """The connections to the ranks, by rank."""
        return [follower.connection for follower in self._all]

    def leading(self, own: AdapterSlots, part: ModelCut | None) -> LeadingAdapters:
        """Returns the adapters of all ranks, of which rank 0 has its `own` for its part of the model."""
        assert part is not None
        return LeadingAdapters(own, part, [follower.adapters for follower in self._all], self.lose)

    def await_loaded(self) -> None:
        """Waits until all ranks have loaded their parts. Called when rank 0 has loaded its own.

        Raises:
            ConfigurationError: a rank refuses to, or differs from this one.
            DeviceLost: a rank has ended, or does not arrive in time.
        """
        expected = fingerprint_of(self._settings, self._folder)
        for follower, loaded in self._receive(Loaded):
            if loaded.fingerprint is None:
                raise ConfigurationError(f"rank {follower.rank}: {loaded.refusal}")
            if difference := expected.difference(loaded.fingerprint):
                raise ConfigurationError(
                    f"rank {follower.rank} differs from rank 0 in its {difference}: start all ranks with the same ones"
                )

    def await_ready(self) -> None:
        """Waits until all ranks wait for calls. From then on a silent rank is a lost one, if ranks are watched.

        Raises:
            DeviceLost: a rank has ended, or does not arrive in time.
        """
        for follower, _ in self._receive(Ready):
            follower.core_wait = seconds_without_core(follower.process.pid)
            follower.ready = True

    def receive(self, kind: type[T]) -> list[T]:
        """Waits for a message of each rank.

        Raises:
            DeviceLost: a rank has ended, or does not answer in time.
        """
        return [message for _, message in self._receive(kind)]

    def tell(self, message: msgspec.Struct) -> None:
        """Sends a message to all ranks.

        Raises:
            DeviceLost: a rank has ended.
        """
        for follower in self._all:
            try:
                follower.connection.send(message)
            except OSError as error:
                raise self._ended(follower) from error

    def watch(self, heartbeats: Int64) -> None:
        """Looks for ranks that have ended or are silent from now on. `heartbeats` [ranks] counts those of each."""
        self._watching = threading.Thread(target=self._watch, args=(heartbeats,), name="ranks", daemon=True)
        self._watching.start()

    def on_lost(self, wake: Callable[[], None]) -> None:
        """Has `wake` called when a rank is lost, at once if one is. A loss meanwhile may call it twice."""
        self._wakes.append(wake)
        if self.lost:
            wake()

    def lose(self, rank: int, reason: str) -> None:
        """Ends all ranks, because of one. Any thread may call it."""
        if self._closing or self.lost:
            return
        self.lost = f"rank {rank} {reason}"
        _log.error("rank_lost", rank=rank, process=self.processes[rank - 1], reason=reason)
        self.abort()
        for each in self._all:
            each.process.kill()
        for wake in self._wakes:
            wake()

    def close(self) -> None:
        """Ends all ranks."""
        self._closing = True
        if self._watching is not None:
            self._watching.join()
        self.abort()
        for follower in self._all:
            follower.connection.close()
            follower.adapters.close()
        for follower in self._all:
            if self._watching is not None:
                with suppress(subprocess.TimeoutExpired):
                    follower.process.wait(CLOSE_TIMEOUT)
            follower.process.kill()
            follower.process.wait()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _receive(self, kind: type[T]) -> list[tuple[_Follower, T]]:
        now = time.monotonic()
        until = now + START_TIMEOUT + (now - self._started)
        messages = []
        for follower in self._all:
            try:
                message = follower.connection.receive(kind, max(0.0, until - time.monotonic()))
            except TimeoutError as error:
                waited = time.monotonic() - self._started
                raise DeviceLost(f"rank {follower.rank} has not arrived within {waited:.0f} s") from error
            except (EOFError, OSError) as error:
                raise self._ended(follower) from error
            messages.append((follower, message))
        return messages

    def _ended(self, follower: _Follower) -> DeviceLost:
        return DeviceLost(f"rank {follower.rank} has ended at the start: its log says why")

    def _watch(self, heartbeats: Int64) -> None:
        """Looks for ranks that have ended or are silent, until the ranks are closed or one is lost."""
        poll = select.poll()
        for follower in self._all:
            poll.register(follower.connection, _ENDED)
        looked_at = time.monotonic()
        while not (self._closing or self.lost):
            ended = {descriptor for descriptor, _ in poll.poll(CHECK_INTERVAL * 1000)}
            before, looked_at = looked_at, time.monotonic()
            # A machine that stood still stops all ranks.
            elapsed = min(looked_at - before, 2 * CHECK_INTERVAL)
            for follower in self._all:
                if follower.connection.fileno() in ended:
                    self.lose(follower.rank, "has ended")
                elif follower.ready and self._silence(follower, int(heartbeats[follower.rank]), elapsed) > SILENCE:
                    self.lose(follower.rank, "is silent")

    def _silence(self, follower: _Follower, heartbeats: int, elapsed: float) -> float:
        """Returns for how many seconds a rank has been silent though none of its threads waited for a core."""
        core_wait = seconds_without_core(follower.process.pid)
        starved, follower.core_wait = max(0.0, core_wait - follower.core_wait), core_wait
        follower.silent = 0.0 if heartbeats != follower.heartbeats else follower.silent + max(0.0, elapsed - starved)
        follower.heartbeats = heartbeats
        return follower.silent
