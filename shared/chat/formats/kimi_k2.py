"""Kimi K2: a section of calls, each `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}`."""

import re

from pagewire.shared.chat.json_call import MAX_NAME_LENGTH
from pagewire.shared.chat.reader import Malformed, Reader, Steps

OPEN = "<|tool_calls_section_begin|>"
CLOSE = "<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"

_ID = re.compile(r"[\w.:-]")
"""A character of a call's id."""


def kimi_k2(reader: Reader) -> Steps[None]:
    """Reads content with sections of calls in it."""
    return reader.content_around(OPEN, _calls)


def _calls(reader: Reader) -> Steps[None]:
    while True:
        yield from reader.space()
        yield from _call(reader)
        yield from reader.space()
        reader.mark()
        if (yield from reader.optional(CLOSE)) or (yield from reader.peek()) != "<":
            return


def _call(reader: Reader) -> Steps[None]:
    yield from reader.expect(CALL)
    yield from reader.space()
    identity = yield from reader.match(_ID, MAX_NAME_LENGTH)
    name = identity.removeprefix("functions.").rpartition(":")
    yield from reader.space()
    yield from reader.expect(ARGUMENTS)
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise Malformed
    reader.call(name[0] or name[2])
    yield from reader.nested(reader.out.arguments)
    yield from reader.space()
    yield from reader.optional(CALL_END)
