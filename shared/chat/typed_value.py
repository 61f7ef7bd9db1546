"""The values of arguments in formats that write them as plain text between tags."""

import json
from collections.abc import Collection
from typing import Any

from pagewire.shared.chat.reader import Malformed, Reader, Steps

_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""JSON of the constants as templates write them, which are Python's Jinja."""


def argument_value(reader: Reader, close: str) -> Steps[str]:
    """Returns the text up to the tag `close`, which is read too. Raises Malformed if it is missing."""
    pieces: list[str] = []
    if not (yield from reader.until(close, pieces.append)):
        raise Malformed
    return "".join(pieces)


def json_value(text: str, *, is_text: bool) -> str:
    """Returns the JSON of a value; a text that is no JSON is a text, whether or not it `is_text`.

    >>> json_value("True", is_text=False), json_value("True", is_text=True), json_value("oh", is_text=False)
    ('true', '"True"', '"oh"')
    """
    if not is_text:
        try:
            value: Any = json.loads(_PYTHON.get(text.strip(), text))
            encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
            encoded.encode()  # half of a surrogate pair is no text
            return encoded
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def add_argument(reader: Reader, name: str, value: str, texts: Collection[str], *, first: bool) -> None:
    """Adds an argument to the call that was begun last. `texts`: names of the arguments that are texts."""
    begin = "{" if first else ", "
    key = json.dumps(name, ensure_ascii=False)
    reader.out.arguments(f"{begin}{key}: {json_value(value, is_text=name in texts)}")
