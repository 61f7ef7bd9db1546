"""Qwen 3 Coder and 3.5: `<tool_call><function=f><parameter=k>value</parameter></function></tool_call>`.

One newline on each side of a value is markup.
"""

import re

from pagewire.shared.chat.json_call import MAX_NAME_LENGTH
from pagewire.shared.chat.reader import Reader, Steps
from pagewire.shared.chat.typed_value import add_argument, argument_value

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_NAME = re.compile(r"[^<>\s]")
"""A character of a name."""


def qwen3_coder(reader: Reader) -> Steps[None]:
    """Reads content with calls in it. An argument goes out when it is complete, as JSON."""
    return reader.content_around(OPEN, _call)


def _call(reader: Reader) -> Steps[None]:
    yield from reader.space()
    yield from reader.expect("<function=")
    function = yield from reader.match(_NAME, MAX_NAME_LENGTH)
    yield from reader.expect(">")
    reader.call(function)
    texts, first = reader.texts.get(function, ()), True
    try:
        while True:
            yield from reader.space()
            if not (yield from reader.optional("<parameter=")):
                break
            name = yield from reader.match(_NAME, MAX_NAME_LENGTH)
            yield from reader.expect(">")
            value = yield from argument_value(reader, "</parameter>")
            value = value.removeprefix("\n").removesuffix("\n")
            add_argument(reader, name, value, texts, first=first)
            first = False
    finally:
        if not reader.was_cut:
            reader.out.arguments("{}" if first else "}")
    yield from reader.optional("</function>")
    yield from reader.space()
    yield from reader.optional(CLOSE)
