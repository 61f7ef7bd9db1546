"""The ids of HTTP requests: the client's, in the header X-Request-Id, and the pipeline's."""

import re
import secrets

from starlette.types import Scope

HEADER = b"x-request-id"
"""The header that has the client's id, in requests and answers."""
_READABLE = re.compile(rb"[\x21-\x7e]{1,128}")
"""An id that may be repeated in a header."""
_TOKEN = re.compile(rb"[A-Za-z0-9_-]{1,48}")
"""An id that may begin the pipeline's, which has at most 64 characters."""


def client_id_of(scope: Scope) -> bytes:
    """Returns the id in the request's header; empty if there is none, or it cannot be repeated in the answer."""
    value = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return value if _READABLE.fullmatch(value) else b""


def new_id(client_id: bytes = b"") -> str:
    """Returns an id for the pipeline, which begins with the client's, if that fits.

    It is new for each request: proxies give all requests of one user's action the same id in the header, and these
    must not become one request of the pipeline.
    """
    if not _TOKEN.fullmatch(client_id):
        return secrets.token_hex(12)
    return f"{client_id.decode()}-{secrets.token_hex(4)}"
