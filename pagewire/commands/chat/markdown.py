"""Draws Markdown in the terminal while it arrives."""

import re
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

INTERVAL = 0.1
"""Seconds between two drawings of the unfinished block."""

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def split_finished(text: str) -> tuple[str, str]:
    """Returns the finished blocks of a Markdown text and the unfinished rest.

    A block ends at a blank line outside fenced code, if the next line is not indented: an indented line may belong to
    the item of a list. `text` begins outside fenced code.

    >>> split_finished("A paragraph.\\n\\nThe next")
    ('A paragraph.\\n\\n', 'The next')
    """
    fence = ""
    end = position = 0
    blank = False
    for line in text.splitlines(keepends=True):
        if blank and line.strip() and not fence and not line[0].isspace():
            end = position
        blank = not line.strip()
        position += len(line)
        if match := _FENCE.match(line):
            if not fence:
                fence = match[1]
            elif match[1].startswith(fence) and not line.strip(" \n`~"):
                fence = ""
    return text[:end], text[end:]


class MarkdownWriter:
    """Draws a Markdown text in the terminal as its parts arrive: `with MarkdownWriter(console) as writer: ...`

    A finished block is printed once. Only the unfinished block is redrawn, so the cost of a part does not grow with the
    text. Of an unfinished block that is higher than the terminal, only the last lines are shown.

    Args:
        console: the terminal.
        clock: returns the time in seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._open = ""
        self._drawn = 0.0
        self._printed = False
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Prints the unfinished block."""
        self._live.update("", refresh=True)
        self._print(self._open)
        self._live.stop()

    def write(self, text: str) -> None:
        """Adds a part of the text."""
        self._open += text
        if "\n" in self._open:
            finished, rest = split_finished(self._open)
            if finished:
                self._live.update("")
                self._print(finished)
                self._open = rest
        if (now := self._clock()) - self._drawn >= INTERVAL:
            self._drawn = now
            self._live.update(_LastLines(self._open, below=self._printed), refresh=True)

    def _print(self, text: str) -> None:
        if text.strip():
            if self._printed:
                self._console.print()
            self._console.print(Markdown(text))
            self._printed = True


class _LastLines:
    """A Markdown text, or as many of its last lines as the terminal can show."""

    def __init__(self, text: str, *, below: bool) -> None:
        self._text = text
        self._below = below

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self._text), options.update(height=None), pad=False)
        if self._below:
            lines.insert(0, [])  # the blank line between two blocks
        for number, line in enumerate(lines[-max(1, options.max_height - 1) :]):
            if number:
                yield Segment.line()
            yield from line
