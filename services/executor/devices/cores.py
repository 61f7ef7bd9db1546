"""Shares the machine's cores out between the threads that compute and the services beside them."""

import math
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOK = 0.5
"""Seconds between two looks at who used the cores."""
SPARE = 0.4
"""Cores without work, on average, from which on nobody is in another's way."""
MARGIN = 0.1
"""Cores that computing must leave unused of those that it has, or else it could do with more."""
NICE = os.getpriority(os.PRIO_PROCESS, 0)
"""Niceness that this process began with."""
POLITE = 2
"""How much nicer threads are that compute together: whoever has a message to handle goes first, but does not keep a
thread for long from the end of a part that the others wait for. Where Linux shares the cores out by sessions or by
containers, that is the executor's own event loop alone."""
FIRST = -19
"""How much nicer a thread is that has left the other cores to the services: nobody interrupts it, and they handle
together what comes meanwhile. Where only root may have that, it remains as it was."""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds of all cores together since they began to count."""

    total: float
    idle: float


def read_used(stat: Path, cores: Collection[int]) -> Used:
    """What Linux counts in `stat`, its /proc/stat. Raises OSError where there is none."""
    names = {f"cpu{core}" for core in cores}
    total = idle = 0
    for line in stat.read_text().splitlines():
        name, _, ticks = line.partition(" ")
        if name in names:
            counts = [int(tick) for tick in ticks.split()[:8]]  # guests are counted among the users
            total += sum(counts)
            idle += counts[3] + counts[4]
    return Used(total / _TICKS, idle / _TICKS)


def next_threads(threads: int, most: int, computing: float, idle: float) -> int:
    """How many threads compute from now on, at least 1.

    While there are cores to spare, one more than before. Else as many as computing has had the time of: where fewer can
    do it, the services have a core of their own, which spares both sides interruptions.

    Args:
        threads: that have computed.
        most: at least 1.
        computing: cores that they were given, on average.
        idle: cores that nobody used, on average.
    """
    needed = math.ceil(computing + MARGIN)
    if idle >= SPARE or (needed > threads and idle >= MARGIN):
        return min(most, threads + 1)
    return max(1, min(threads, needed))


class Cores:
    """Those of one device, for the thread that it computes on."""

    def __init__(self, most: int, compute_on: Callable[[int], None], stat: Path = Path("/proc/stat")) -> None:
        """Begins with `most` threads. `compute_on` is told how many to compute on."""
        self._most = most
        self._compute_on = compute_on
        self._stat = stat
        self._cores = os.sched_getaffinity(0)
        self._looked = -math.inf
        self._computed = 0.0
        self._used: Used | None = None
        self._begin(most)

    def look(self, now: float) -> None:
        """To be called before each step, at the second `now`: from time to time changes the number of threads."""
        seconds = now - self._looked
        if seconds < LOOK or self._most == 1:
            return
        self._looked = now
        try:
            used = read_used(self._stat, self._cores)
        except OSError:
            return  # nobody knows: it stays as it is
        computed, before = time.process_time(), self._used
        threads = self._most
        # After a pause nobody knows what this load needs; and some sandboxes do not count.
        if before is not None and used.total > before.total and seconds < 2 * LOOK:
            computing, idle = (computed - self._computed) / seconds, (used.idle - before.idle) / seconds
            threads = next_threads(self._threads, self._most, computing, idle)
        if threads != self._threads:
            self._begin(threads)
        self._computed, self._used = computed, used

    def _begin(self, threads: int) -> None:
        self._threads = threads
        alone = threads == 1 < self._most
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, NICE + (FIRST if alone else POLITE))
        self._compute_on(threads)
