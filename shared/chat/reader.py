"""Reads a text that arrives in pieces, as a grammar of generators that yield whenever they need more of it.

A grammar takes a decision once no further text could change it: the result does not depend on where the text is cut.
"""

import re
from collections.abc import Callable, Collection, Generator, Mapping
from typing import TypeVar

from pagewire.shared.chat.parts import WHITE, PartWriter

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a grammar: it yields for more text, and returns a value in the end."""

_OUTSIDE = re.compile(r'["{}\[\]]')
"""Characters of JSON outside strings that begin or end something."""
_STRICT = re.compile(r"""["{}\[\]]|[^\s:,a-z0-9E+.-]""")
"""Characters of `_OUTSIDE`, and all that JSON does not have outside strings."""
_INSIDE = re.compile(r'["\\]')
"""Characters in a JSON string that end it or escape the next one."""


class Malformed(Exception):
    """The text is not what the grammar expects here."""


class Held:
    """Text that is held back until its meaning is certain."""

    def __init__(self, limit: int) -> None:
        """`limit`: maximum number of characters."""
        self.text = ""
        self._limit = limit

    def take(self, piece: str) -> None:
        """Appends a piece. Raises Malformed if the text is too long then."""
        self.text += piece
        if len(self.text) > self._limit:
            raise Malformed


class Reader:
    """The text of one message and the position in it.

    Attributes:
        out: takes the parts that the grammar finds.
        texts: names of the arguments that are texts, by tool.
    """

    def __init__(self, out: PartWriter, texts: Mapping[str, Collection[str]]) -> None:
        self.out = out
        self.texts = texts
        self._text = ""
        """The text from the mark or the position on."""
        self._at = 0
        """Position in `_text` of the next character."""
        self._ended = False
        """Whether no text follows."""
        self._cut = False
        """Whether something else than the model has ended the text."""
        self._mark = -1
        """Position of the first character that may be refused; -1: there is none."""
        self._bare = False
        """Whether a call begins without a tag, so that content may look like one."""
        self._again = -1
        """Position at which reading goes on if the text since the mark is refused."""

    def feed(self, text: str) -> None:
        """Appends a piece of the text."""
        start = self._mark if self.marked else self._at
        self._text = self._text[start:] + text
        self._at -= start
        if self.marked:
            self._mark, self._again = 0, self._again - start

    def end(self, *, cut: bool) -> None:
        """Ends the text. If it was `cut`, a tag or a call that has begun and cannot go on is dropped."""
        self._ended, self._cut = True, cut
        begin = self._mark if self.marked else self._at
        if cut and not self._bare and (self.marked or len(self._text) - begin > 1):  # one character may be content
            self._text, self._at = self._text[:begin], begin
            self.commit()

    @property
    def marked(self) -> bool:
        """Whether the text since `mark` may still be refused."""
        return self._mark >= 0

    @property
    def was_cut(self) -> bool:
        """Whether the text was cut, and is read to its end."""
        return self._cut and self._at == len(self._text)

    def mark(self, length: int = 0) -> None:
        """Begins something that may be refused: the `length` characters that were read last, and what follows."""
        self._mark, self._again = self._at - length, self._at

    def commit(self) -> None:
        """Accepts the text since the mark."""
        self._mark = -1

    def refuse(self) -> None:
        """Makes the marked text content, and reads the text behind it again. Nothing happens without a mark."""
        if self.marked:
            self.out.content(self._text[self._mark : self._again])
            self._at = self._again
            self.commit()

    def attempt(self, grammar: Steps[None]) -> Steps[None]:
        """Reads a text as `grammar` describes. If the text is something else, refuses what is marked by then."""
        try:
            yield from grammar
        except Malformed:
            self.refuse()
        self.commit()

    def content_around(self, tag: str, grammar: Callable[["Reader"], Steps[None]]) -> Steps[None]:
        """Reads content, and behind each `tag` in it a text as `grammar` describes."""
        while (yield from self.until(tag, self.out.content)):
            self.mark(len(tag))
            yield from self.attempt(grammar(self))

    def content_behind(self, grammar: Callable[["Reader"], Steps[None]], *, bare: bool = False) -> Steps[None]:
        """Reads a text as `grammar` describes; the rest is content. `bare`: no tag tells the two apart."""
        self._bare = bare
        self.mark()
        yield from self.attempt(grammar(self))
        yield from self.rest(self.out.content)

    def call(self, name: str) -> None:
        """Begins a call: the text so far can no longer be refused."""
        self.commit()
        self.out.call(name)

    def until(self, end: str, emit: Callable[[str], None]) -> Steps[bool]:
        """Reads up to and including `end`, and emits the text before it; returns whether `end` was there."""
        while (position := self._text.find(end, self._at)) < 0:
            keep = 0 if self._ended else _overlap(self._text, self._at, end)
            self._emit(len(self._text) - keep, emit)
            if self._ended:
                return False
            yield
        self._emit(position, emit)
        self._at = position + len(end)
        return True

    def rest(self, emit: Callable[[str], None]) -> Steps[None]:
        """Emits the rest of the text."""
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
            Malformed: no character matches, or more than `limit` do.
        """
        run = ""
        while (character := (yield from self.peek())) and pattern.fullmatch(character):
            run += character
            self._at += 1
            if len(run) > limit:
                raise Malformed
        if not run:
            raise Malformed
        return run

    def nested(self, emit: Callable[[str], None], *, strict: bool = False) -> Steps[bool]:
        """Reads a JSON object or array, and emits it as it comes; returns False if the text ends within it.

        Only strings and brackets are looked at. With `strict`, all characters outside strings must be JSON's.

        Raises:
            Malformed: a character outside strings is not JSON's.
        """
        outside = _STRICT if strict else _OUTSIDE
        depth, quoted, escaped = 0, False, False
        while True:
            at = self._at
            if escaped and at < len(self._text):
                at, escaped = at + 1, False
            while (character := (_INSIDE if quoted else outside).search(self._text, at)) is not None:
                at = character.end()
                match character[0]:
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
    """Returns the length of the longest suffix of `text[start:]` that `end` begins with.

    >>> _overlap("4 </th", 0, "</think>")
    4
    """
    longest = min(len(end) - 1, len(text) - start)
    return next((length for length in range(longest, 0, -1) if end.startswith(text[len(text) - length :])), 0)
