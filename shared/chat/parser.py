"""Turns the text of an answer into a message, as the text comes or at once."""

from dataclasses import dataclass, field
from functools import partial

from pagewire.shared.chat.formats import HARMONY, NAMED, REASONING, REQUIRED, TOOL_CALLS, forced
from pagewire.shared.chat.formats.harmony import harmony
from pagewire.shared.chat.formats.think import think
from pagewire.shared.chat.parts import Kind, Part, PartWriter
from pagewire.shared.chat.reader import Reader, Steps
from pagewire.shared.messages.client import ChatFormat


class MessageParser:
    """Finds reasoning and tool calls in the text of one completion.

    Any split of a text gives the same message. Content and reasoning are passed on as soon as no further text could
    change what they are, and arguments as soon as their format says their JSON: some write each one as plain text
    between tags. A text that looks like a call and turns out to be something else is content.

    >>> parser = MessageParser(ChatFormat(reasoning="think"))
    >>> parser.push("<think>Easy.</th")
    [Part(kind=<Kind.REASONING: 2>, text='Easy.', call=-1)]
    >>> parser.push("ink>4")
    [Part(kind=<Kind.CONTENT: 1>, text='4', call=-1)]
    """

    def __init__(self, form: ChatFormat) -> None:
        self._out = PartWriter(single=form.single)
        self._reader = Reader(self._out, form.texts)
        self._forced = form.tool_calls == REQUIRED
        self._steps = _message(self._reader, form)
        next(self._steps)

    def push(self, text: str) -> list[Part]:
        """Returns the parts that a piece of the text completes."""
        self._reader.feed(text)
        next(self._steps)
        return self._out.take()

    def end(self, *, cut: bool = False) -> list[Part]:
        """Returns the rest of the message, whose text has ended. Must be called once.

        `cut`: the limit of tokens or a stop string has ended it: what has begun of a call is then no content, and a
        call that has not ended has no whole arguments. A text that a grammar forces to be calls is nothing else,
        whatever ends it.
        """
        self._reader.end(cut=cut or self._forced)
        next(self._steps, None)
        self._out.end()
        return self._out.take()


@dataclass(slots=True)
class Call:
    """A call that a model has made."""

    name: str
    arguments: str = ""
    """JSON as the model has written it: it may be invalid."""


@dataclass(slots=True)
class Message:
    """The message of an assistant."""

    content: str | None = None
    """Text for the user; None: there is no text at all."""
    reasoning: str | None = None
    """Reasoning before the answer; None: there is no reasoning at all."""
    calls: list[Call] = field(default_factory=list)
    """Calls of tools."""

    def add(self, part: Part) -> None:
        """Appends a part."""
        match part.kind:
            case Kind.CONTENT:
                self.content = (self.content or "") + part.text
            case Kind.REASONING:
                self.reasoning = (self.reasoning or "") + part.text
            case Kind.NAME:
                self.calls.append(Call(part.text))
            case Kind.ARGUMENTS:
                self.calls[part.call].arguments += part.text


def read_message(text: str, form: ChatFormat | None, *, cut: bool = False) -> Message:
    """Returns the message of a whole text, which the limit of tokens or a stop string may have `cut`.

    `form`: the `chat_format` of the result that has the text.

    >>> message = read_message('[{"name": "f", "parameters": {"a": 1}}]', ChatFormat(tool_calls="required"))
    >>> message.calls
    [Call(name='f', arguments='{"a": 1}')]
    """
    message = Message()
    for part in read_parts(text, form, cut=cut):
        message.add(part)
    return message


def read_parts(text: str, form: ChatFormat | None, *, cut: bool = False) -> list[Part]:
    """Returns the parts of a whole text; the arguments are those of `read_message`."""
    if form is None:
        return [Part(Kind.CONTENT, text)]
    parser = MessageParser(form)
    return [*parser.push(text), *parser.end(cut=cut)]


def _message(reader: Reader, form: ChatFormat) -> Steps[None]:
    yield from reader.peek()
    if HARMONY in (form.tool_calls, form.reasoning):
        yield from harmony(reader, partial(_answer, form=form) if form.tool_calls in {NAMED, REQUIRED} else None)
        return
    if form.reasoning:
        yield from think(reader, REASONING[form.reasoning], opened=form.opened)
    yield from _answer(reader, form)


def _answer(reader: Reader, form: ChatFormat) -> Steps[None]:
    if form.tool_calls == NAMED:
        yield from forced.named(reader, form.tool)
    elif form.tool_calls:
        yield from TOOL_CALLS[form.tool_calls](reader)
    else:
        yield from reader.rest(reader.out.content)
