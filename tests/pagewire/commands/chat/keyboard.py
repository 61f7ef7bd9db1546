"""`pagewire chat` on a terminal of its own, with somebody who types."""

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl

from tests.pagewire.serving import COMMAND

CONTROLLED = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
"""Python program that runs a command with its standard input as controlling terminal: Ctrl-C becomes a SIGINT."""
CTRL_C, CTRL_D, ENTER, ALT_ENTER = "\x03", "\x04", "\r", "\x1b\r"

_ESCAPES = re.compile(rb"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])")


class Keyboard:
    """Types on the terminal of a process, and reads what the process shows there."""

    def __init__(self, process: "subprocess.Popen[bytes]", terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self._seen = b""

    def type(self, keys: str) -> None:
        """Types some keys."""
        os.write(self._terminal, keys.encode())

    def expect(self, pattern: str, within: float = 20.0) -> str:
        """Waits for a text; returns everything up to its end since the last one, without colours and the like."""
        deadline = time.monotonic() + within
        while (match := re.search(pattern, self._shown())) is None:
            assert time.monotonic() < deadline, f"there is no {pattern} in {self._shown()!r}"
            assert self._read(), f"the process has ended without {pattern}: {self._shown()!r}"
        shown = self._shown()
        self._seen = shown[match.end() :].encode()
        return shown[: match.end()]

    def prompt(self) -> None:
        """Waits until keys are read: what is typed before would be echoed in the middle of an answer."""
        self.expect(r">[ \x08]*$")

    def wait(self, within: float = 20.0) -> int:
        """Waits for the end of the process; returns its exit code."""
        deadline = time.monotonic() + within
        while self._read():
            assert time.monotonic() < deadline
        return self.process.wait(within)

    def _shown(self) -> str:
        return _ESCAPES.sub(b"", self._seen).decode(errors="replace")

    def _read(self) -> bool:
        """Reads what is there; returns False when the process has closed the terminal."""
        if select.select([self._terminal], [], [], 0.5)[0]:
            try:
                self._seen += os.read(self._terminal, 1 << 16)
            except OSError:  # what Linux says when the last process has closed it
                return False
        return True


@contextmanager
def chatting(*arguments: str, **environ: str) -> Iterator[Keyboard]:
    """Runs `pagewire chat` on a terminal of 30 lines; kills what is left of it at the end."""
    ours, theirs = pty.openpty()
    ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLED, *COMMAND, "chat", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environ},
    )
    os.close(theirs)
    try:
        yield Keyboard(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        os.close(ours)
