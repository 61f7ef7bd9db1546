"""The parts of an assistant's message: content, reasoning and tool calls, as a parser finds them in a text."""

from enum import Enum, auto
from typing import NamedTuple

WHITE = " \t\r\n"
"""White space: around reasoning and calls it is markup and no part of a message."""


class Kind(Enum):
    """The piece of a message that a part belongs to."""

    CONTENT = auto()
    REASONING = auto()
    NAME = auto()
    """The name of the next call, whole."""
    ARGUMENTS = auto()
    """More of the arguments of the last call."""


class Part(NamedTuple):
    """The next part of a message."""

    kind: Kind
    text: str
    call: int = -1
    """Index of the call; -1: the part belongs to none."""


class PartWriter:
    """Collects the parts of one message, without the white space between them."""

    def __init__(self, *, single: bool) -> None:
        """`single`: whether calls after the first are dropped."""
        self._single = single
        self._parts: list[Part] = []
        self._calls = 0
        self._trims = False
        """Whether white space that comes next is dropped."""
        self._kind = Kind.CONTENT
        """Kind of the last text."""
        self._space = ""
        """White space at the end of the last text, which is dropped if something else follows."""

    def content(self, text: str) -> None:
        """Adds content."""
        self._text(Kind.CONTENT, text)

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        self._text(Kind.REASONING, text)

    def separate(self) -> None:
        """Ends the text so far, and begins another: white space around this place is no part of either."""
        self._space = ""
        self._trims = True

    def call(self, name: str) -> None:
        """Begins a call."""
        self.separate()
        self._calls += 1
        self._add(Kind.NAME, name)

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that was begun last."""
        if text:
            self._add(Kind.ARGUMENTS, text)

    def take(self) -> list[Part]:
        """Returns the parts since the last time, neighbours of one kind as one part."""
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> None:
        """Adds the white space at the end of the message."""
        if self._space:
            self._add(self._kind, self._space)

    def _text(self, kind: Kind, text: str) -> None:
        if self._trims:
            text = text.lstrip(WHITE)
        if not text:
            return
        self._trims = False
        self._kind = kind
        body = text.rstrip(WHITE)
        if body:
            self._add(kind, self._space + body)
            self._space = ""
        self._space += text[len(body) :]

    def _add(self, kind: Kind, text: str) -> None:
        call = self._calls - 1 if kind in {Kind.NAME, Kind.ARGUMENTS} else -1
        if self._single and call > 0:
            return
        if self._parts and kind is not Kind.NAME and self._parts[-1].kind is kind:
            text = self._parts.pop().text + text
        self._parts.append(Part(kind, text, call))
