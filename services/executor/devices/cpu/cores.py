"""Divides the machine's cores between compute threads and the other services."""

import math
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.5
"""Seconds between two measurements of CPU usage."""
SPARE = 0.4
"""Idle cores, on average, from which on another compute thread disturbs no other service."""
MARGIN = 0.1
"""Cores that compute threads must leave unused; with less left, another thread would help."""
NICE = os.getpriority(os.PRIO_PROCESS, 0)
"""Niceness with which this process started."""
SHARED_NICENESS = 2
"""Niceness added while several threads compute: a service with a message to handle runs first, but does not delay for
long a thread that the other threads wait for. Where Linux divides the cores by sessions or containers, only the
executor's own event loop runs first."""
ALONE_NICENESS = -19
"""Niceness added while a single thread computes and the services have the other cores: no service interrupts the
thread. Ignored where only root may lower the niceness."""
EVENT_LOOP_NICENESS = ALONE_NICENESS - 1
"""Niceness added to the main thread, the event loop, while a single other thread computes: where the two share a core,
or a part of one, heartbeats and plans would otherwise wait for seconds."""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU seconds of all cores together since the machine started."""

    total: float
    idle: float


def read_cpu_usage(stat: Path, cores: Collection[int]) -> CpuUsage:
    """Reads the usage of `cores` from `stat`, which is Linux's /proc/stat.

    Raises:
        OSError: the file cannot be read.
    """
    names = {f"cpu{core}" for core in cores}
    total = idle = 0
    for line in stat.read_text().splitlines():
        name, _, ticks = line.partition(" ")
        if name in names:
            counts = [int(tick) for tick in ticks.split()[:8]]  # the user column includes the guest columns after these
            total += sum(counts)
            idle += counts[3] + counts[4]
    return CpuUsage(total / _TICKS, idle / _TICKS)


def next_threads(threads: int, most: int, computing: float, idle: float) -> int:
    """Returns how many threads to compute on from now on, at least 1.

    While there are idle cores, the number grows by one. Otherwise it is the number of cores that computing has used: if
    fewer threads can do the work, the services get a core of their own, which avoids interruptions on both sides.

    Args:
        threads: current number of threads.
        most: maximum number of threads, at least 1.
        computing: cores that the threads used, on average.
        idle: idle cores, on average.
    """
    needed = math.ceil(computing + MARGIN)
    if idle >= SPARE or (needed > threads and idle >= MARGIN):
        return min(most, threads + 1)
    return max(1, min(threads, needed))


class Cores:
    """Adjusts the number of compute threads of one device to the load of the machine."""

    def __init__(self, most: int, compute_on: Callable[[int], None], stat: Path = Path("/proc/stat")) -> None:
        """Starts with `most` threads. `compute_on` is called with every new number of threads."""
        self._most = most
        self._compute_on = compute_on
        self._stat = stat
        self._cores = os.sched_getaffinity(0)
        self._measured_at = -math.inf
        self._computed = 0.0
        self._usage: CpuUsage | None = None
        self._begin(most)

    def adjust(self, now: float) -> None:
        """Changes the number of threads if it is time to. Called before each step; `now` is in seconds."""
        seconds = now - self._measured_at
        if seconds < INTERVAL or self._most == 1:
            return
        self._measured_at = now
        try:
            usage = read_cpu_usage(self._stat, self._cores)
        except OSError:
            return  # unknown usage: the number of threads stays
        computed, before = time.process_time(), self._usage
        threads = self._most
        # A measurement over a pause says nothing about the load, and some sandboxes do not count CPU time.
        if before is not None and usage.total > before.total and seconds < 2 * INTERVAL:
            computing, idle = (computed - self._computed) / seconds, (usage.idle - before.idle) / seconds
            threads = next_threads(self._threads, self._most, computing, idle)
        if threads != self._threads:
            self._begin(threads)
        self._computed, self._usage = computed, usage

    def close(self) -> None:
        """Gives the main thread its niceness back: it may go on with other work, or start processes."""
        _set_niceness(os.getpid(), 0)

    def _begin(self, threads: int) -> None:
        self._threads = threads
        alone = threads == 1 < self._most
        _set_niceness(0, ALONE_NICENESS if alone else SHARED_NICENESS)
        if threading.get_native_id() != os.getpid():
            _set_niceness(os.getpid(), EVENT_LOOP_NICENESS if alone else 0)
        self._compute_on(threads)


def use_shared_niceness() -> None:
    """Gives this thread, and those that it starts, the niceness of several threads that compute."""
    _set_niceness(0, SHARED_NICENESS)


def _set_niceness(thread: int, more: int) -> None:
    """Sets the niceness of a thread, 0 for this one, to that of the start and `more`, where that is allowed."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, thread, NICE + more)
