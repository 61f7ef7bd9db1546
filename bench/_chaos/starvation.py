"""Takes the cores away from a process, or from all."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARE = 0.05
"""Share of a core that a starved process has."""
PERIOD = 0.1
"""Seconds of the period in which a starved process runs once."""
CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
"""Folders of the cgroups of version 1, and of version 2."""
BUSY_PROCESSES = 16
"""Processes that compete for the cores of a busy machine."""


async def starve(pid: int, seconds: float, share: float = SHARE) -> None:
    """Leaves a process a share of a core: by a cgroup where this user may make one, else by SIGSTOP and SIGCONT.

    Linux counts for how long a process waits for its cgroup's turn, as for a core; one that is stopped does not wait.
    """
    with suppress(ProcessLookupError):  # it was given up and killed meanwhile
        for folder in CGROUPS:
            with suppress(PermissionError, FileNotFoundError):
                with _throttled(folder, pid, share):
                    await asyncio.sleep(seconds)
                return
        await _stop_and_go(pid, seconds, share)


@contextmanager
def _throttled(parent: Path, pid: int, share: float) -> Iterator[None]:
    """Keeps a process in a new cgroup below `parent` that has a share of a core."""
    quota, period = int(PERIOD * share * 1e6), int(PERIOD * 1e6)
    folder = Path(tempfile.mkdtemp(prefix="pagewire-", dir=parent))
    try:
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota} {period}")
        else:
            (folder / "cpu.cfs_period_us").write_text(f"{period}")
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}")
        (folder / "cgroup.procs").write_text(f"{pid}")
        yield
    finally:
        with suppress(OSError):  # it has ended
            (parent / "cgroup.procs").write_text(f"{pid}")
        with suppress(OSError):  # it is ending: an empty group costs nothing
            folder.rmdir()


async def _stop_and_go(pid: int, seconds: float, share: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    try:
        while loop.time() < end:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(PERIOD * (1 - share))
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(PERIOD * share)
    finally:
        os.kill(pid, signal.SIGCONT)


async def occupy_cores(seconds: float) -> None:
    """Keeps all cores of the machine busy with processes that only count."""
    spin = "while True: pass"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", spin) for _ in range(BUSY_PROCESSES)]
    try:
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in processes))
