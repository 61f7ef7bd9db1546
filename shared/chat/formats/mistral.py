"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}]`, or with newer tokenizers `[TOOL_CALLS]f{...}` per call.

`[ARGS]` may be before the arguments, and `[CALL_ID]` with an id before that.
"""

import re

from pagewire.shared.chat.json_call import MAX_NAME_LENGTH, call_array, call_object
from pagewire.shared.chat.reader import Malformed, Reader, Steps

OPEN = "[TOOL_CALLS]"

_NAME = re.compile(r"[\w.-]")
"""A character of a name."""


def mistral(reader: Reader) -> Steps[None]:
    """Reads content with calls behind it."""
    return reader.content_around(OPEN, _calls)


def _calls(reader: Reader) -> Steps[None]:
    yield from reader.space()
    match (yield from reader.peek()):
        case "[":
            yield from call_array(reader)
        case "{":
            yield from call_object(reader)
        case _:
            yield from _named(reader)


def _named(reader: Reader) -> Steps[None]:
    name = yield from reader.match(_NAME, MAX_NAME_LENGTH)
    if (yield from reader.optional("[CALL_ID]")):
        yield from reader.match(_NAME, MAX_NAME_LENGTH)
    yield from reader.optional("[ARGS]")
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise Malformed
    reader.call(name)
    yield from reader.nested(reader.out.arguments)
