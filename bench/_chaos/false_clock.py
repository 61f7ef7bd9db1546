"""A clock of the services that is wrong, by libfaketime (Debian's package `libfaketime`)."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
"""Where Debian installs the library; empty: it is not installed."""
READ_EVERY = 1
"""Seconds after which a process reads the offset again."""


class FalseClock:
    """The offset of all processes that are started while it is in the environment."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def set(self, seconds: float) -> None:
        """Sets by how many seconds the processes' clocks are ahead."""
        self._file.write_text(f"{seconds:+.0f}\n")


@contextmanager
def false_clock() -> Iterator[FalseClock]:
    """Has processes that are started inside the block read their clock through libfaketime; durations stay right.

    Programs that are linked statically, such as nats-server, keep the right time.
    """
    with tempfile.TemporaryDirectory() as folder:
        clock = FalseClock(Path(folder) / "offset")
        clock.set(0)
        variables = {
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(Path(folder) / "offset"),
            "FAKETIME_CACHE_DURATION": str(READ_EVERY),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield clock
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
