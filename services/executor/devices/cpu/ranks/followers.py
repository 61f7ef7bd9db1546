"""The processes of the ranks other than 0: rank 0 starts them, watches them, and ends with them."""

import mmap
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from pagewire.kernels.cpu.collectives import SharedMemoryCollectives, memory_bytes
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor import rank_processes
from pagewire.services.executor.devices.cpu.ranks.shared_calls import CallSizes, SharedCalls
from pagewire.services.executor.devices.cpu.ranks.startup import Line, Loaded, Ready, Sizes, Start, fingerprint_of
from pagewire.services.executor.devices.protocol import Capacity, DeviceLost
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process.linux_process import seconds_without_core
from pagewire.shared.settings.config import Settings

T = TypeVar("T", bound=msgspec.Struct)

START_TIMEOUT = 120.0
"""Seconds that the other ranks may need to load their parts after rank 0 has loaded its own, and as long again as that
has taken."""
CLOSE_TIMEOUT = 2.0
"""Seconds within which a rank must end when it is told to."""
CHECK_INTERVAL = 0.1
"""Seconds between two checks of the signs of life."""
SILENCE = 1.0
"""Seconds without a sign of life after which a rank counts as lost; those in which it waits for a core do not count."""

_log = structlog.get_logger()


@dataclass
class _Follower:
    """A rank's process, as rank 0 sees it."""

    rank: int
    process: "subprocess.Popen[bytes]"
    line: Line
    thread: int = 0
    """Id of the thread that gives signs of life."""
    beat: int = 0
    """The last sign of life."""
    core_wait: float = 0.0
    """Seconds for which the thread has waited for a core, at the last check."""
    silent: float = 0.0
    """Seconds without a sign of life."""


@dataclass
class Followers:
    """All ranks other than 0.

    Attributes:
        collectives: rank 0's view of all ranks.
        lost: whether a rank has ended or is silent, so that none goes on.
    """

    collectives: SharedMemoryCollectives
    _settings: Settings
    _folder: Path
    _memory: int
    """File descriptor of the shared memory."""
    _first: int
    """Bytes of it that the collectives have."""
    _all: Sequence[_Follower]
    lost: bool = False
    _started: float = field(default_factory=time.monotonic)
    _watching: threading.Thread | None = None
    _closing: bool = False
    _wakes: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def start(cls, settings: Settings, folder: Path, kernels: CpuKernels) -> "Followers":
        """Tells a process per rank what to load, each with as many threads as `kernels` have."""
        size = settings.tensor_parallel_size
        started, first = rank_processes.take(size), memory_bytes(kernels, size)
        os.ftruncate(started.memory, first)
        collectives = SharedMemoryCollectives(kernels, mmap.mmap(started.memory, first), 0, size)
        followers = []
        for rank, one in enumerate(started.processes, 1):
            line = Line(one.end)
            followers.append(_Follower(rank, one.process, line))
            with suppress(OSError):  # a rank that has ended at once is noticed when it is awaited
                line.send(Start(settings, str(folder), rank, kernels.threads, started.memory))
        return cls(collectives, settings, folder, started.memory, first, followers)

    @property
    def processes(self) -> list[int]:
        """Process ids, by rank."""
        return [follower.process.pid for follower in self._all]

    def await_loaded(self) -> None:
        """Waits until all ranks have loaded their parts. Called when rank 0 has loaded its own.

        Raises:
            ConfigurationError: a rank refuses to, or differs from this one.
            DeviceLost: a rank has ended, or does not arrive in time.
        """
        expected = fingerprint_of(self._settings, self._folder)
        now = time.monotonic()
        until = now + START_TIMEOUT + (now - self._started)
        for follower in self._all:
            loaded = self._receive(follower, Loaded, until)
            if loaded.fingerprint is None:
                raise ConfigurationError(f"rank {follower.rank}: {loaded.refusal}")
            if difference := expected.difference(loaded.fingerprint):
                raise ConfigurationError(
                    f"rank {follower.rank} differs from rank 0 in its {difference}: start all ranks with the same ones"
                )

    def open_calls(self, capacity: Capacity, width: int) -> SharedCalls:
        """Tells all ranks the capacity, waits until they are ready for calls, and watches them from then on.

        Raises:
            DeviceLost: a rank has ended, or does not arrive in time.
        """
        sizes = CallSizes.of(capacity, width)
        os.ftruncate(self._memory, self._first + sizes.nbytes)
        shared = mmap.mmap(self._memory, sizes.nbytes, offset=self._first)
        calls = SharedCalls(shared, sizes, self.collectives)
        for follower in self._all:
            try:
                follower.line.send(Sizes(capacity))
            except OSError as error:
                raise self._ended(follower) from error
        until = time.monotonic() + START_TIMEOUT
        for follower in self._all:
            follower.thread = self._receive(follower, Ready, until).beating
            follower.core_wait = seconds_without_core(follower.thread)
        self._watching = threading.Thread(target=self._watch, args=(calls,), name="ranks", daemon=True)
        self._watching.start()
        return calls

    def on_lost(self, wake: Callable[[], None]) -> None:
        """Has `wake` called when a rank is lost."""
        self._wakes.append(wake)

    def close(self) -> None:
        """Ends all ranks."""
        self._closing = True
        if self._watching is not None:
            self._watching.join()
        self.collectives.abort()
        for follower in self._all:
            if self._watching is not None:
                with suppress(subprocess.TimeoutExpired):
                    follower.process.wait(CLOSE_TIMEOUT)
            follower.process.kill()
            follower.process.wait()
            follower.line.close()
        os.close(self._memory)

    def _receive(self, follower: _Follower, kind: type[T], until: float) -> T:
        try:
            return follower.line.receive(kind, max(0.0, until - time.monotonic()))
        except TimeoutError as error:
            waited = time.monotonic() - self._started
            raise DeviceLost(f"rank {follower.rank} has not arrived within {waited:.0f} s") from error
        except (EOFError, OSError) as error:
            raise self._ended(follower) from error

    def _ended(self, follower: _Follower) -> DeviceLost:
        return DeviceLost(f"rank {follower.rank} has ended at the start: its log says why")

    def _watch(self, calls: SharedCalls) -> None:
        """Looks for ranks that have ended or are silent, until the ranks are closed or one is lost."""
        lines = select.poll()
        for follower in self._all:
            lines.register(follower.line, select.POLLIN)
        looked_at = time.monotonic()
        while not (self._closing or self.lost):
            ended = {descriptor for descriptor, _ in lines.poll(CHECK_INTERVAL * 1000)}
            before, looked_at = looked_at, time.monotonic()
            # A machine that stood still stops all ranks.
            elapsed = min(looked_at - before, 2 * CHECK_INTERVAL)
            for follower in self._all:
                if follower.line.fileno() in ended:
                    self._lose(follower, "has ended")
                elif self._silence(follower, int(calls.beats[follower.rank]), elapsed) > SILENCE:
                    self._lose(follower, "is silent")

    def _silence(self, follower: _Follower, beat: int, elapsed: float) -> float:
        """Returns for how many seconds a rank has been silent though it did not wait for a core."""
        core_wait = seconds_without_core(follower.thread)
        starved, follower.core_wait = core_wait - follower.core_wait, core_wait
        follower.silent = 0.0 if beat != follower.beat else follower.silent + max(0.0, elapsed - starved)
        follower.beat = beat
        return follower.silent

    def _lose(self, follower: _Follower, reason: str) -> None:
        if self._closing or self.lost:
            return
        self.lost = True
        _log.error("rank_lost", rank=follower.rank, process=follower.process.pid, reason=reason)
        self.collectives.abort()
        for each in self._all:
            each.process.kill()
        for wake in self._wakes:
            wake()
