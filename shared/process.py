"""A process and its parent: whatever a supervisor started goes when the supervisor goes, however it goes."""

import ctypes
import os
import signal
import sys

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
