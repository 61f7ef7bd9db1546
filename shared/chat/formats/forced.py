"""Texts of a model that a grammar forces to call: no tags, only JSON."""

from pagewire.shared.chat.json_call import call_array
from pagewire.shared.chat.reader import Reader, Steps


def required(reader: Reader) -> Steps[None]:
    """Reads `[{"name": "f", "parameters": {...}}]`, with at least one call."""
    return reader.content_behind(_array)


def _array(reader: Reader) -> Steps[None]:
    yield from reader.space()
    yield from call_array(reader)


def named(reader: Reader, name: str) -> Steps[None]:
    """Reads the arguments of the one call that may be made."""
    reader.mark()
    yield from reader.space()
    if not (yield from reader.peek()):  # the text has ended before the call, within the reasoning
        reader.refuse()
        yield from reader.rest(reader.out.content)
        return
    reader.call(name)
    yield from reader.rest(reader.out.arguments)
