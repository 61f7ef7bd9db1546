"""Llama 3 and 4 with JSON: the whole text is `{"name": "f", "parameters": {...}}`; several calls are joined by `;`."""

from pagewire.shared.chat.json_call import call_object
from pagewire.shared.chat.reader import Reader, Steps

TAG = "<|python_tag|>"


def llama3_json(reader: Reader) -> Steps[None]:
    """Reads calls, or else content."""
    return reader.content_behind(_calls, bare=True)


def _calls(reader: Reader) -> Steps[None]:
    yield from reader.space()
    yield from reader.optional(TAG)
    while True:
        yield from reader.space()
        yield from call_object(reader, bare=True)
        yield from reader.space()
        reader.mark()
        if not (yield from reader.optional(";")):
            return
