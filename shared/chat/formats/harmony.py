"""Harmony, as of gpt-oss: messages in channels, `<|channel|>analysis<|message|>...<|end|><|start|>assistant...`.

A message of the channel analysis is reasoning, one with a recipient (`to=functions.f`) is a call, others are content.
"""

import re
from collections.abc import Callable
from functools import partial

from pagewire.shared.chat.json_call import MAX_NAME_LENGTH
from pagewire.shared.chat.reader import Held, Malformed, Reader, Steps

CHANNEL, MESSAGE, END, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
CALL, CONSTRAIN, RETURN = "<|call|>", "<|constrain|>", "<|return|>"
TAGS = (CHANNEL, MESSAGE, END, START, CALL, CONSTRAIN, RETURN)
NEXT = f"{START}assistant"
"""Beginning of each message after the first."""
FINAL = f"{CHANNEL}final{MESSAGE}"
"""Header of the message to the user."""
COMMENTARY = f"{CHANNEL}commentary"
"""Beginning of the header of a call."""

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
"""The called tool in a header."""
_ENDS = (END, CALL, RETURN)
"""Tags behind a message."""
_BEGINS = ("<", " ")
"""First characters of a header."""


def harmony(reader: Reader, answer: Callable[[Reader], Steps[None]] | None = None) -> Steps[None]:
    """Reads messages; the prompt has begun the first one. Text without a header is content.

    `answer` reads the last message; None: it is content.
    """
    if answer is not None and (yield from reader.peek()) not in _BEGINS:
        yield from answer(reader)
        return
    yield from reader.content_behind(partial(_messages, answer=answer))


def _messages(reader: Reader, answer: Callable[[Reader], Steps[None]] | None) -> Steps[None]:
    while True:
        header = yield from _header(reader)
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            reader.call(recipient[1])
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                yield from reader.nested(reader.out.arguments)
            elif not reader.was_cut:
                reader.out.arguments("{}")
        reader.commit()
        reader.out.separate()
        if recipient is None:
            channel = header.partition(CHANNEL)[2].strip()
            if answer is not None and channel == "final":
                yield from answer(reader)
                return
            yield from reader.until(END, reader.out.reasoning if channel == "analysis" else reader.out.content)
            reader.out.separate()
        yield from reader.space()
        for tag in _ENDS:
            yield from reader.optional(tag)
        reader.mark()
        yield from reader.space()
        if not (yield from reader.peek()):
            return
        yield from reader.expect(START)
        yield from reader.expect("assistant")


def _header(reader: Reader) -> Steps[str]:
    """Returns the text between the beginning of a message and its content. Raises Malformed if it is no header."""
    header = Held(MAX_NAME_LENGTH)
    if (yield from reader.peek()) not in _BEGINS:
        raise Malformed
    if not (yield from reader.until(MESSAGE, header.take)):
        raise Malformed
    return header.text
