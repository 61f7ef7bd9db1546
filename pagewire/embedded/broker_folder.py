"""The temporary folder of an embedded broker: its configuration, which has all passwords, and its store."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "pagewire-broker-"


class BrokerFolder:
    """A new folder, which this process holds with a lock. Where a process was killed, the next one removes its folder.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):  # it is gone, another user's, or held by a process that lives
                _remove_abandoned(path)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(path: Path) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.getuid() and any(path.iterdir()):  # an empty one is about to be locked
            shutil.rmtree(path)
    finally:
        os.close(lock)
