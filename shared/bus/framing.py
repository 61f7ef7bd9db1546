"""The rules of NATS that both buses follow: valid subjects, the format of headers, and how handlers are called."""

import asyncio
import re
from collections.abc import Mapping
from functools import lru_cache

import structlog

from pagewire.shared.bus.protocol import Handler, Message

MAX_CONTROL_LINE = 4096
"""Maximum length in bytes of a command's line (subject, reply subject and sizes), by a server's default."""
STATUS = "Status"
"""Header of messages that the broker itself sends."""
CACHED_SUBJECTS = 4096
"""Number of subjects whose validity is cached: a stream publishes every token to the same subject."""
NO_RESPONDERS = "503"
"""Status that the broker sends to the reply subject of a message without a subscriber."""

_VERSION = "NATS/1.0"
_is_subject = re.compile(r"[!-)+-=?-~]+").fullmatch
_is_pattern = re.compile(r"(?:(?:\*|[!-)+\-/-=?-~]+)\.)*(?:\*|>|[!-)+\-/-=?-~]+)").fullmatch
_is_header_name = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_LINE_BREAKS = str.maketrans("\r\n", "  ")

log = structlog.get_logger()


@lru_cache(CACHED_SUBJECTS)
def check_subject(subject: str) -> None:
    """Checks a subject to publish to, which must not inject another command into the connection.

    Raises:
        ValueError: the subject has white space, control characters, non-ASCII characters or wildcards.
    """
    if _is_subject(subject) is None:
        raise ValueError(f"not a subject: {subject!r}")


def check_pattern(pattern: str) -> None:
    """Checks a subject to subscribe to; after an invalid one a server would end the connection.

    Raises:
        ValueError: a token is empty or a wildcard is misplaced.
    """
    if _is_pattern(pattern) is None:
        raise ValueError(f"not a subject to subscribe to: {pattern!r}")


def header_block(headers: Mapping[str, str] | None) -> bytes:
    """Returns headers in the wire format, empty for no headers. Line breaks in values become spaces.

    >>> header_block({"Content-Type": "application/msgpack"})
    b'NATS/1.0\\r\\nContent-Type: application/msgpack\\r\\n\\r\\n'

    Raises:
        ValueError: a name is not valid as the name of an HTTP header.
    """
    if not headers:
        return b""
    lines = [_VERSION]
    for name, value in headers.items():
        if _is_header_name(name) is None:
            raise ValueError(f"not a header name: {name!r}")
        lines.append(f"{name}: {value.translate(_LINE_BREAKS).strip()}")
    return "\r\n".join([*lines, "", ""]).encode()


def read_headers(block: bytes) -> dict[str, str]:
    """Parses headers in the wire format. A status on the first line becomes the header `STATUS`.

    Invalid UTF-8 is replaced, and lines without a colon are ignored.
    """
    first, *lines = block.decode(errors="replace").split("\r\n")
    status = first.removeprefix(_VERSION).split(maxsplit=1)
    headers = {STATUS: status[0]} if status else {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


def deliver(handler: Handler, message: Message) -> None:
    """Calls a handler and logs any exception, so that one bad message does not end a subscription."""
    try:
        handler(message)
    except (Exception, asyncio.CancelledError):
        log.exception("handler_failed", subject=message.subject)
