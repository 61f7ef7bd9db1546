"""Processes that are stopped for a while, as a frozen host is."""

import os
import signal
from pathlib import Path

from tests.support.waiting import until


async def freeze(pid: int) -> None:
    """Stops a process and returns once all its threads stand; a thread on another core may run on after the signal."""
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: all(_stands(task) for task in Path(f"/proc/{pid}/task").iterdir()))


def _stands(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
