"""Reads a text that arrives in pieces, as a grammar of generators that yield whenever they need more of it.

What a grammar does depends on the text alone and not on how it was cut: a decision is taken once no further text could
change it.
"""

import re
from collections.abc import Callable, Collection, Generator, Mapping
from typing import TypeVar

from pagewire.shared.chat.parts import WHITE, PartWriter

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a grammar: it yields for more text, and returns a value in the end."""

_OUTSIDE = re.compile(r'["{}\[\]]')
_STRICT = re.compile(r"""["{}\[\]]|[^\s:,a-z0-9E+.-]""")
"""Like `_OUTSIDE`, and characters that no JSON has outside strings."""
_INSIDE = re.compile(r'["\\]')


class Malformed(Exception):
    """The text is not what the grammar expects here."""


class Held:
    """Text that is held back until it is known what it is."""

    def __init__(self, most: int) -> None:
        """`most`: characters."""
        self.text = ""
        self._most = most

    def take(self, piece: str) -> None:
        """Appends a piece. Raises Malformed if the text is too long then."""
        self.text += piece
        if len(self.text) > self._most:
            raise Malformed


class Reader:
    """The text of one message and the position in it.

    Attributes:
        out: takes the parts that the grammar finds.
        texts: names of the arguments that are texts, by tool.
        marked: whether the text since `mark` may still turn out to be something else.
    """

    def __init__(self, out: PartWriter, texts: Mapping[str, Collection[str]]) -> None:
        self.out = out
        self.texts = texts
        self._text = ""
        self._at = 0
        self._ended = False
        self._mark = -1
        self._again = -1
        """Where reading goes on if the text since the mark is refused."""

    def feed(self, text: str) -> None:
        """Appends a piece of the text."""
        start = self._mark if self.marked else self._at
        self._text = self._text[start:] + text
        self._at -= start
        if self.marked:
            self._mark, self._again = 0, self._again - start

    def end(self) -> None:
        """Says that no text follows."""
        self._ended = True

    @property
    def marked(self) -> bool:
        """Whether what was read last may still be refused."""
        return self._mark >= 0

    def mark(self, length: int = 0) -> None:
        """Begins something that may be refused: the `length` characters that were read last, and what follows."""
        self._mark, self._again = self._at - length, self._at

    def commit(self) -> None:
        """Accepts what was read since the mark."""
        self._mark = -1

    def refuse(self) -> None:
        """Makes what was marked content, and reads what follows it again. Nothing happens without a mark."""
        if self.marked:
            self.out.content(self._text[self._mark : self._again])
            self._at = self._again
            self.commit()

    def attempt(self, grammar: Steps[None]) -> Steps[None]:
        """Reads what `grammar` describes. If the text is something else, refuses what is marked by then."""
        try:
            yield from grammar
        except Malformed:
            self.refuse()
        self.commit()

    def call(self, name: str) -> None:
        """Begins a call: what was read so far can no longer be refused."""
        self.commit()
        self.out.call(name)

    def until(self, end: str, emit: Callable[[str], None]) -> Steps[bool]:
        """Reads up to and including `end`, and emits what is before it; returns whether `end` was there."""
        while (found := self._text.find(end, self._at)) < 0:
            keep = 0 if self._ended else _overlap(self._text, self._at, end)
            self._emit(len(self._text) - keep, emit)
            if self._ended:
                return False
            yield
        self._emit(found, emit)
        self._at = found + len(end)
        return True

    def rest(self, emit: Callable[[str], None]) -> Steps[None]:
        """Emits all that follows."""
        while True:
            self._emit(len(self._text), emit)
            if self._ended:
                return
            yield

    def peek(self) -> Steps[str]:
        """Returns the next character, which stays unread; empty at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def next(self) -> Steps[str]:
        """Reads one character. Raises Malformed at the end."""
        character = yield from self.peek()
        if not character:
            raise Malformed
        self._at += 1
        return character

    def space(self) -> Steps[None]:
        """Reads white space, if there is any."""
        while (character := (yield from self.peek())) and character in WHITE:
            self._at += 1

    def expect(self, text: str) -> Steps[None]:
        """Reads `text`. Raises Malformed if something else is there."""
        if not (yield from self.optional(text)):
            raise Malformed

    def optional(self, text: str) -> Steps[bool]:
        """Reads `text` if it is there; returns whether it was."""
        while not self._text.startswith(text, self._at):
            if self._ended or not text.startswith(self._text[self._at :]):
                return False
            yield
        self._at += len(text)
        return True

    def match(self, pattern: "re.Pattern[str]", limit: int) -> Steps[str]:
        """Reads the longest run of characters that match `pattern` one by one.

        Raises:
            Malformed: there is none, or more than `limit`.
        """
        found = ""
        while (character := (yield from self.peek())) and pattern.fullmatch(character):
            found += character
            self._at += 1
            if len(found) > limit:
                raise Malformed
        if not found:
            raise Malformed
        return found

    def nested(self, emit: Callable[[str], None], *, strict: bool = False) -> Steps[bool]:
        """Reads a JSON object or array, and emits it as it comes; returns False if the text ends within it.

        Only strings and brackets are looked at, and with `strict` what cannot be outside strings.

        Raises:
            Malformed: it has a character that cannot be there.
        """
        outside = _STRICT if strict else _OUTSIDE
        depth, quoted, escaped = 0, False, False
        while True:
            at = self._at
            if escaped and at < len(self._text):
                at, escaped = at + 1, False
            while (found := (_INSIDE if quoted else outside).search(self._text, at)) is not None:
                at = found.end()
                match found[0]:
                    case '"':
                        quoted = not quoted
                    case "\\":
                        escaped = at == len(self._text)
                        at += 1
                    case "{" | "[":
                        depth += 1
                    case "}" | "]":
                        depth -= 1
                        if depth <= 0:
                            self._emit(at, emit)
                            return True
                    case _:
                        raise Malformed
            self._emit(len(self._text), emit)
            if self._ended:
                return False
            yield

    def _emit(self, end: int, emit: Callable[[str], None]) -> None:
        if end > self._at:
            emit(self._text[self._at : end])
            self._at = end


def _overlap(text: str, start: int, end: str) -> int:
    """Returns the length of the longest suffix of `text[start:]` that `end` begins with."""
    longest = min(len(end) - 1, len(text) - start)
    return next((length for length in range(longest, 0, -1) if end.startswith(text[len(text) - length :])), 0)
