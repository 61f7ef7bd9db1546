"""Pythonic, as of Llama 3.2 and 4: the whole text is `[f(a=1, b="x"), g()]`, with Python's or JSON's literals."""

import ast
import json
import re
import warnings

from pagewire.shared.chat.json_call import MAX_NAME_LENGTH
from pagewire.shared.chat.reader import Malformed, Reader, Steps

OPEN = "<|python_start|>"
CLOSE = "<|python_end|>"

_NAME = re.compile(r"[\w.]")
"""A character of a name."""
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
"""Change of the depth at a bracket."""


def pythonic(reader: Reader) -> Steps[None]:
    """Reads calls, or else content. Each argument goes out when it is complete, as JSON."""
    return reader.content_behind(_calls, bare=True)


def _calls(reader: Reader) -> Steps[None]:
    yield from reader.space()
    yield from reader.optional(OPEN)
    yield from reader.space()
    yield from reader.expect("[")
    while True:
        yield from reader.space()
        yield from _call(reader)
        yield from reader.space()
        reader.mark()
        if not (yield from reader.optional(",")):
            yield from reader.expect("]")
            reader.commit()
            yield from reader.space()
            yield from reader.optional(CLOSE)
            return


def _call(reader: Reader) -> Steps[None]:
    name = yield from reader.match(_NAME, MAX_NAME_LENGTH)
    yield from reader.expect("(")
    yield from reader.space()
    before = "{"
    while not (yield from reader.optional(")")):
        key = yield from reader.match(_NAME, MAX_NAME_LENGTH)
        yield from reader.space()
        yield from reader.expect("=")
        value = _to_json((yield from _literal(reader)))
        if before == "{":
            reader.call(name)
        reader.out.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")
        before = ", "
        if (yield from reader.optional(",")):
            yield from reader.space()
    if before == "{":
        reader.call(name)
        reader.out.arguments("{")
    reader.out.arguments("}")


def _literal(reader: Reader) -> Steps[str]:
    """Returns the text up to the comma or the bracket behind a value."""
    characters: list[str] = []
    depth, quote = 0, ""
    while True:
        character = yield from reader.peek()
        if not quote and not depth and character in {",", ")"}:
            return "".join(characters)
        yield from reader.next()
        characters.append(character)
        if quote:
            if character == "\\":
                characters.append((yield from reader.next()))
            elif character == quote:
                quote = ""
        elif character in {"'", '"'}:
            quote = character
        else:
            depth += _BRACKETS.get(character, 0)


def _to_json(literal: str) -> str:
    """Returns the JSON of a literal. Raises Malformed if the text is no literal.

    >>> _to_json("{'a': (1, True)}")
    '{"a": [1, true]}'
    """
    text = literal.strip()
    try:
        try:
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
                value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = json.loads(text)
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
        encoded.encode()  # half of a surrogate pair is no text
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise Malformed from error
    return encoded
