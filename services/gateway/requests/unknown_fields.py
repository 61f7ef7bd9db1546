"""Fields of a request body that nobody documents: they are ignored and named, or refused."""

import difflib
import re
from collections.abc import Collection

from pagewire.shared.errors import InvalidRequest

HEADER = b"pagewire-warning"
"""Response header that names the ignored fields."""
MAX_NAMES = 16
"""Names in the header; the others are counted."""
REFUSED = {
    "guided_choice": "structured_outputs",
    "guided_decoding_backend": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs",
    "messages": "prompt",
    "prompt": "messages",
}
"""Fields that would change the answer, elsewhere or in earlier versions of vLLM, and what to send instead."""
_PRINTABLE = re.compile(r"[\w.-]{1,64}", re.ASCII)


class UnknownFields:
    """The unknown fields of one request.

    Attributes:
        strict: whether the first one is refused.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: list[str] = []
        self._count = 0

    def add(self, name: str, known: Collection[str]) -> None:
        """Notes a field; `known` are the names of those that could be meant.

        Raises:
            InvalidRequest: the field must not be ignored.
        """
        shown = name if _PRINTABLE.fullmatch(name) else "?"
        if instead := REFUSED.get(name):
            raise InvalidRequest(f"the field `{name}` is not supported: send {instead} instead", field=name)
        if self.strict:
            close = difflib.get_close_matches(shown, known, 1)
            hint = f"do you mean {close[0]}?" if close else "leave it out, or start the server without --strict"
            raise InvalidRequest(f"the field `{shown}` is unknown: {hint}", field=shown)
        self._count += 1
        if len(self._names) < MAX_NAMES:
            self._names.append(shown)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the response header that names the ignored fields; none if there are none."""
        if not self._names:
            return []
        more = self._count - len(self._names)
        names = ", ".join(self._names) + (f" and {more} more" if more else "")
        return [(HEADER, f"ignored unknown fields: {names}".encode())]
