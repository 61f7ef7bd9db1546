"""A call as a JSON object with a name and arguments, the form that most formats have in common."""

import json
from collections.abc import Generator
from typing import Any

from pagewire.shared.chat.reader import Held, Malformed, Reader, Steps

MAX_NAME_LENGTH = 256
"""Characters of a name, and of any other key or text, before it is known whether they belong to a call."""
MAX_HELD_LENGTH = 8192
"""Characters of arguments that are held back because the name comes after them."""

BARE_KEYS = ("name", "type")
"""Keys that a call without a tag begins with."""
_ARGUMENTS = ("arguments", "parameters")
"""Keys of the arguments."""
_SCALARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
"""Characters of numbers, `true`, `false` and `null`."""


def call_object(reader: Reader, *, bare: bool = False) -> Steps[None]:
    """Reads `{"name": "f", "arguments": {...}}`, in any order, with `parameters` as another name, and other keys.

    The arguments go out as they come, to the letter. The call can no longer be refused once its name and the beginning
    of its arguments are known.

    Args:
        reader: reads the text.
        bare: whether no tag tells a call from other JSON: then it begins with one of `BARE_KEYS`, and has arguments.

    Raises:
        Malformed: the text is something else.
    """
    name, early_arguments = "", ""
    has_arguments = begun = False
    first_key = True
    yield from reader.expect("{")
    while True:
        yield from reader.space()
        key = yield from _string(reader)
        if bare and first_key and key not in BARE_KEYS:
            raise Malformed
        first_key = False
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key == "name" and not name:
            name = yield from _string(reader)
            if not name:
                raise Malformed
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            if (yield from reader.peek()) != "{":
                raise Malformed
            if name:
                reader.call(name)
                begun = True
                yield from reader.nested(reader.out.arguments)
            else:
                early_arguments = yield from _object_or_array(reader)
        else:
            yield from _skip(reader)
        yield from reader.space()
        following = yield from reader.next()
        if following == "}":
            break
        if following != ",":
            raise Malformed
    if not name or (bare and not has_arguments):
        raise Malformed
    if not begun:
        reader.call(name)
        reader.out.arguments(early_arguments or "{}")


def call_array(reader: Reader) -> Steps[None]:
    """Reads calls as a JSON array. If an element after the first is no call, it is content, and so is the rest.

    Raises:
        Malformed: the text is something else.
    """
    yield from reader.expect("[")
    while True:
        yield from reader.space()
        yield from call_object(reader)
        yield from reader.space()
        reader.mark()
        if not (yield from reader.optional(",")):
            yield from reader.expect("]")
            return


def _object_or_array(reader: Reader) -> Steps[str]:
    """Returns an object or array. Raises Malformed if it does not end, or is too long to be held back."""
    value = Held(MAX_HELD_LENGTH)
    if not (yield from reader.nested(value.take, strict=True)):
        raise Malformed
    return value.text


def _skip(reader: Reader) -> Steps[None]:
    """Reads the value of another key."""
    first = yield from reader.peek()
    if first == '"':
        yield from _string(reader)
    elif first in {"{", "["}:
        yield from _object_or_array(reader)
    else:
        for _ in range(MAX_NAME_LENGTH):
            if (yield from reader.peek()) not in _SCALARS:
                return
            yield from reader.next()
        raise Malformed


def _string(reader: Reader) -> Generator[None, None, str]:
    """Returns the value of a JSON string."""
    yield from reader.expect('"')
    raw = '"'
    while True:
        character = yield from reader.next()
        raw += character
        if character == '"':
            break
        if character == "\\":
            raw += yield from reader.next()
        if len(raw) > MAX_NAME_LENGTH:
            raise Malformed
    try:
        value: Any = json.loads(raw, strict=False)
        value.encode()  # half of a surrogate pair is no text
    except ValueError as error:
        raise Malformed from error
    return str(value)
