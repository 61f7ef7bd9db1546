"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once per call."""

from pagewire.shared.chat.json_call import call_object
from pagewire.shared.chat.reader import Reader, Steps

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def hermes(reader: Reader) -> Steps[None]:
    """Reads content with calls in it. The closing tag of a call may be missing."""
    return reader.content_around(OPEN, _call)


def _call(reader: Reader) -> Steps[None]:
    yield from reader.space()
    yield from call_object(reader)
    yield from reader.space()
    yield from reader.optional(CLOSE)
