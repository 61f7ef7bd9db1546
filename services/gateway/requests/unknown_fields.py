"""Undocumented fields of a request body, which are ignored and named, or refused."""

import difflib
import re
from collections.abc import Collection

from pagewire.shared.errors import InvalidRequest

HEADER = b"pagewire-warning"
"""Response header that names the ignored fields."""
MAX_NAMES = 16
"""Names in the header; further ones are counted."""
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
        self._count = 0

    def add(self, name: str, documented: Collection[str]) -> None:
        """Notes a field; `documented`: names that it may be a misspelling of.

        Raises:
            InvalidRequest: the field must not be ignored.
        """
        printable = name if _PRINTABLE.fullmatch(name) else "?"
        if instead := REPLACEMENTS.get(name):
            raise InvalidRequest(f"the field `{name}` is not supported: send {instead} instead", field=name)
        if self.strict:
            close = difflib.get_close_matches(printable, documented, 1)
            hint = f"do you mean {close[0]}?" if close else "leave it out, or start the server without --strict"
            raise InvalidRequest(f"the field `{printable}` is unknown: {hint}", field=printable)
        self._count += 1
        if len(self._names) < MAX_NAMES:
            self._names.append(printable)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the response header that names the ignored fields; empty if no field was ignored."""
        if not self._names:
            return []
        more = self._count - len(self._names)
        names = ", ".join(self._names) + (f" and {more} more" if more else "")
        return [(HEADER, f"ignored unknown fields: {names}".encode())]
