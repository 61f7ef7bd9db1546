"""The ids of HTTP requests: that of the client, in the header X-Request-Id, and that of the pipeline."""

import re
import secrets

from starlette.types import Scope

HEADER = b"x-request-id"
"""The header that takes and gives the id."""
_READABLE = re.compile(rb"[\x21-\x7e]{1,128}")
_TOKEN = re.compile(rb"[A-Za-z0-9_-]{1,48}")


def given_id(scope: Scope) -> bytes:
    """Returns the id in the request's header; empty if there is none, or it cannot be repeated in the answer."""
    found = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return found if _READABLE.fullmatch(found) else b""


def new_id(given: bytes = b"") -> str:
    """Returns an id for the pipeline, which begins with the client's, if that fits.

    It is new for each request: proxies give all requests of one user's action the same id in the header, and these
    must not become one request of the pipeline.
    """
    if not _TOKEN.fullmatch(given):
        return secrets.token_hex(12)
    return f"{given.decode()}-{secrets.token_hex(4)}"
