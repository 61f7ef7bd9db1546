"""A process under Linux: the variables and signals of its supervisor, its end with it, its memory and its cores."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pagewire.shared.process.polling import poll

PARENT = "PAGEWIRE_PARENT"
"""Environment variable with the process id of the supervisor that started this process."""
INSTANCE = "PAGEWIRE_INSTANCE"
"""Environment variable with the instance id that the supervisor gave to this process."""
PREDECESSORS = "PAGEWIRE_PREDECESSORS"
"""Environment variable with the process ids, separated by commas, of draining processes that this one succeeds."""
LISTENER = "PAGEWIRE_LISTENER"
"""Environment variable with the file descriptor of the listening socket that the supervisor gave to a gateway."""
BROKER_FOLDER = "PAGEWIRE_BROKER_FOLDER"
"""Environment variable with the folder in which the embedded broker stores its streams."""
AWAITED_MODELS = "PAGEWIRE_AWAITED_MODELS"
"""Environment variable with the tokens, separated by commas, of the models that a gateway awaits at the start."""
REFUSAL = "PAGEWIRE_REFUSAL"
"""Environment variable with the file descriptor to which this process writes why it refuses its settings."""
END_NOW = signal.SIGUSR1
"""Signal by which a supervisor ends a service without a drain."""
STOP = signal.SIGUSR2
"""Signal by which a supervisor drains a service that it will not start again."""

LARGE_ALLOCATION = 1 << 20
"""Smallest allocation, in bytes, that returns to the system as soon as it is freed."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = {
    "memory.max": ("memory.current", "memory.stat", "inactive_file"),
    "memory/memory.limit_in_bytes": (
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
}
"""Files with a container's limit, with what it uses, and with the part of that, by name, that the kernel takes back
from cached files when memory is short; of cgroup v2 and v1."""
TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""File that says whether memory may lie in huge pages."""
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGE = 2 << 20
_MANY_PAGES = 8 * _HUGE_PAGE
"""Bytes of an allocation from which on it is worth huge pages: the stack of a thread is smaller."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Has this process killed when the thread of its supervisor that started it ends, as when the supervisor does; no
    effect without a supervisor."""
    if PARENT in os.environ:
        die_with(int(os.environ[PARENT]))


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread of `parent` that started it ends; no effect outside Linux."""
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def show_command(command: Sequence[str]) -> None:
    """Has Linux show another command line of this process, cut to the length of its own; no effect elsewhere."""
    if _libc is None:
        return
    fields = _fields(os.getpid(), "stat")
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    shown = b"".join(argument.encode() + b"\0" for argument in command)[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def return_freed_memory() -> None:
    """Has the C library return freed memory to the system; no effect outside glibc.

    By default it keeps the memory of large allocations, such as requests of several megabytes, and some per thread. The
    executor does not call this, because it allocates large tensors again and again.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_ALLOCATION)  # also ends the adjustment of this threshold, which grows with use
        mallopt(_M_TRIM_THRESHOLD, 8 * LARGE_ALLOCATION)
        mallopt(_M_ARENA_MAX, 2)


def use_huge_pages() -> None:
    """Moves this process's large allocations into pages of 2 MiB, unless the system forbids these; no effect outside
    Linux, and before Linux 6.1 a slow one.

    A step reads all weights: with pages of 4 KiB, about a tenth of its time goes into looking up their addresses.
    """
    if _libc is None or not TRANSPARENT.exists() or "[never]" in TRANSPARENT.read_text():
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *name = line.split()
        if rights != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
            continue  # a file, shared or protected
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if end - start >= _MANY_PAGES:
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def refuse_settings(reason: str) -> None:
    """Tells the supervisor why this process refuses its settings; without one, prints it."""
    if REFUSAL in os.environ:
        os.write(int(os.environ[REFUSAL]), reason.encode())
    else:
        print(reason, file=sys.stderr)


def predecessors() -> list[int]:
    """Returns the ids of the draining processes whose successor this one is."""
    return [int(process) for process in os.environ.get(PREDECESSORS, "").split(",") if process]


def awaited_models() -> list[str]:
    """Returns the tokens of the models that must have been ready before this gateway is."""
    return [model for model in os.environ.get(AWAITED_MODELS, "").split(",") if model]


async def wait_for(processes: Sequence[int]) -> None:
    """Returns once the processes have ended, at once if there are none."""
    await poll(lambda: not any(map(_exists, processes)))


def resident_bytes(process: int) -> int:
    """Returns the bytes of memory that a process holds, 0 if it has ended."""
    try:
        pages = int(_fields(process, "statm")[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def family_bytes(process: int) -> int:
    """Returns the bytes of memory that a process and its child processes hold, 0 if it has ended."""
    return resident_bytes(process) + sum(map(resident_bytes, children(process)))


def children(process: int) -> list[int]:
    """Returns the ids of the child processes of all threads of a process, none if it has ended."""
    ids: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            ids += map(int, file.read_text().split())
    return sorted(ids)


def seconds_without_core(process: int) -> float:
    """Returns how long the threads of a process have waited for a core, in seconds since each began, added up.

    A thread waits while it could run and others have the cores, or while its cgroup has used up its share. The number
    does not grow while the process is stopped or waits for anything else. Where Linux does not count, it is 0.
    """
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:
        return 0.0
    waited = 0
    for thread in threads:
        with suppress(OSError):  # the thread has ended
            waited += int(_fields(process, f"task/{thread}/schedstat")[1])
    return waited / 1e9


def cpu_seconds(process: int) -> float:
    """Returns for how long all threads of a process together have computed, in seconds since it began; 0 if it has
    ended."""
    try:
        user, system = map(int, _fields(process, "stat")[11:13])  # the 14th and 15th of all fields
    except OSError:
        return 0.0
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _fields(process: int, file: str) -> list[bytes]:
    """Returns the fields of a file of a process; of `stat`, those after the name of the program.

    Read without a buffer and without decoding, since the watchdog reads one per thread of a silent service.
    """
    with open(f"/proc/{process}/{file}", "rb", buffering=0) as lines:
        return lines.read().rpartition(b")")[2].split()


def free_memory() -> int:
    """Returns the bytes that this process can still allocate, by the machine's memory and the container's limit."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, (used, statistics, cached) in _LIMITS.items():
        if (_CGROUP / limit).exists() and (most := (_CGROUP / limit).read_text().strip()) != "max":
            taken = int((_CGROUP / used).read_text()) - _statistic(_CGROUP / statistics, cached)
            free = min(free, int(most) - taken)
    return max(free, 0)


def _statistic(file: Path, name: str) -> int:
    """Returns the number that a file of statistics has in the line `name`; 0 without it."""
    lines = (line.split() for line in file.read_text().splitlines()) if file.exists() else ()
    return next((int(value) for key, value in lines if key == name), 0)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, PermissionError):  # another user has the number now
        return False
    return True


def use_batch_scheduling() -> None:
    """Selects SCHED_BATCH for this process and its future threads; no effect outside Linux.

    When cores are few, the default policy lets each message preempt its sender and be handled alone. With SCHED_BATCH
    the sender goes on, so that messages sent together are handled together. An idle core still takes over at once.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # some sandboxes refuse the call
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
