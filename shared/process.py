"""What a process asks of Linux: to go when its supervisor goes, however it goes, and to leave others their turns."""

import ctypes
import os
import signal
import sys
from contextlib import suppress

PARENT = "PAGEWIRE_PARENT"
"""Environment variable with the process id of the supervisor that started this process."""
INSTANCE = "PAGEWIRE_INSTANCE"
"""Environment variable with the instance id that the supervisor gave to this process."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Follows the supervisor that started this process; nothing if it was started by hand."""
    if PARENT in os.environ:
        follow(int(os.environ[PARENT]))


def follow(parent: int) -> None:
    """Asks the kernel to kill this process when the thread of `parent` that started it ends. Nothing off Linux."""
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def leave_turns() -> None:
    """Lets whoever runs go on when a message arrives for this process, whose threads to come do likewise.

    Where cores are few, each message would else interrupt its sender and be handled alone. So those that are sent
    together are handled together. A core that is free is taken at once all the same. Nothing off Linux.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # some sandboxes refuse: it works without
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
