"""Fields and other elements of a request body without an effect: they are named in a header, or refused."""

import difflib
import re
from collections.abc import Collection, Sized

from pagewire.shared.errors import InvalidRequest

HEADER = b"pagewire-warning"
"""Response header that names the ignored fields and the elements that were left out."""
MAX_NAMES = 16
"""Names in the header; further ones are counted."""
MAX_FIELDS = 1000
"""Fields of a body, or of an object whose fields are looked up one by one: several times as many as are documented."""
REPLACEMENTS = {
    "guided_choice": "structured_outputs",
    "guided_decoding_backend": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs",
    "messages": "prompt",
    "prompt": "messages",
}
"""Fields that would change the answer on other routes or in earlier versions of vLLM, and the field to send instead."""
_PRINTABLE = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""A name that may be repeated in a header."""


class UnknownFields:
    """The unknown fields of one request.

    Attributes:
        strict: whether the first one is refused.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: list[str] = []
        self._left_out: dict[str, None] = {}
        self._count = 0

    def add(self, name: str, documented: Collection[str]) -> None:
        """Notes a field; `documented`: names of the route's fields, which it may be a misspelling of.

        Raises:
            InvalidRequest: the field must not be ignored.
        """
        if (instead := REPLACEMENTS.get(name)) in documented:
            raise InvalidRequest(f"the field `{name}` is not supported: send {instead} instead", field=name)
        if self.strict:
            printable = _printable(name)
            close = difflib.get_close_matches(printable, documented, 1)
            hint = f"do you mean {close[0]}?" if close else "leave it out, or start the server without --strict"
            raise InvalidRequest(f"the field `{printable}` is unknown: {hint}", field=printable)
        self._count += 1
        if len(self._names) < MAX_NAMES:
            self._names.append(_printable(name))

    def leave_out(self, kind: str, name: str) -> None:
        """Notes a documented element without an effect, such as a hosted tool. `kind`: tool, item, block or field."""
        if len(self._left_out) < MAX_NAMES:
            self._left_out[f"{kind} {_printable(name)}"] = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the response header that names what had no effect; empty if everything had one."""
        texts = []
        if self._names:
            more = self._count - len(self._names)
            texts.append("ignored unknown fields: " + ", ".join(self._names) + (f" and {more} more" if more else ""))
        if self._left_out:
            texts.append("left out: " + ", ".join(self._left_out))
        return [(HEADER, "; ".join(texts).encode())] if texts else []


def check_count(fields: Sized, owner: str) -> None:
    """Checks the number of the fields of `owner`.

    Raises:
        InvalidRequest: there are more than `MAX_FIELDS`.
    """
    if len(fields) > MAX_FIELDS:
        raise InvalidRequest(f"{owner} has {len(fields)} fields: send {MAX_FIELDS} at most")


def _printable(name: str) -> str:
    return name if _PRINTABLE.fullmatch(name) else "?"
