"""Processes that tests find, freeze and kill, and the ports for new ones."""

import os
import signal
import socket
from pathlib import Path

from tests.support.waiting import until


def processes(service: str, supervisor: int | None = None) -> list[int]:
    """Returns the processes of a service that `supervisor` has started; None: this process."""
    parent = os.getpid() if supervisor is None else supervisor
    return sorted(
        pid
        for pid in (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
        if (status := _status(pid)) and status[:1] != ["Z"] and int(status[1]) == parent and _serves(pid, service)
    )


def kill(service: str) -> None:
    """Ends the first process of a service that this one has started, without a chance to clean up."""
    os.kill(processes(service)[0], signal.SIGKILL)


def alive(pid: int) -> bool:
    """Returns whether a process runs; one that waits to be reaped does not."""
    return _status(pid)[:1] not in ([], ["Z"])


async def freeze(pid: int) -> None:
    """Stops a process and returns once all its threads stand; a thread on another core may run on after the signal."""
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: all(_stands(task) for task in Path(f"/proc/{pid}/task").iterdir()))


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _status(pid: int) -> list[str]:
    """Returns the state of a process, its parent and what else /proc says; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _serves(pid: int, service: str) -> bool:
    try:
        return f"services.{service}" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def _stands(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
