"""GLM 4.5 and 4.6: `<tool_call>f<arg_key>k</arg_key><arg_value>value</arg_value></tool_call>`, once per call."""

import re

from pagewire.shared.chat.json_call import MAX_NAME_LENGTH
from pagewire.shared.chat.reader import Malformed, Reader, Steps
from pagewire.shared.chat.typed_value import add_argument, argument_value

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_NAME = re.compile(r"[^<>\s{}]")
"""A character of a name."""


def glm45(reader: Reader) -> Steps[None]:
    """Reads content with calls in it. An argument goes out when it is complete, as JSON."""
    return reader.content_around(OPEN, _call)


def _call(reader: Reader) -> Steps[None]:
    yield from reader.space()
    function = yield from reader.match(_NAME, MAX_NAME_LENGTH)
    yield from reader.space()
    following = yield from reader.peek()
    if following not in {"<", ""}:
        raise Malformed
    reader.call(function)
    texts, first = reader.texts.get(function, ()), True
    try:
        while (yield from reader.optional("<arg_key>")):
            name = yield from argument_value(reader, "</arg_key>")
            yield from reader.space()
            yield from reader.expect("<arg_value>")
            value = yield from argument_value(reader, "</arg_value>")
            add_argument(reader, name.strip(), value, texts, first=first)
            first = False
            yield from reader.space()
    finally:
        if not reader.was_cut:
            reader.out.arguments("{}" if first else "}")
    yield from reader.optional(CLOSE)
