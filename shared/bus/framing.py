"""The rules of NATS that both buses keep: what a subject may be, how headers are written, how a handler is called."""

import asyncio
import re
from collections.abc import Mapping
from functools import lru_cache

import structlog

from pagewire.shared.bus.protocol import Handler, Message

MAX_CONTROL_LINE = 4096
"""Bytes of subject, reply and sizes together that a server accepts by default."""
STATUS = "Status"
"""Header of the messages that the broker itself sends."""
SUBJECTS = 4096
"""Subjects that are remembered as valid: a stream publishes every token to the same one."""
NO_RESPONDERS = "503"
"""Status sent to the reply subject of a message that nobody subscribes to."""

_VERSION = "NATS/1.0"
_is_subject = re.compile(r"[!-)+-=?-~]+").fullmatch
_is_pattern = re.compile(r"(?:(?:\*|[!-)+\-/-=?-~]+)\.)*(?:\*|>|[!-)+\-/-=?-~]+)").fullmatch
_is_header_name = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_LINE_BREAKS = str.maketrans("\r\n", "  ")

log = structlog.get_logger()


@lru_cache(SUBJECTS)
def check_subject(subject: str) -> None:
    """Refuses what would be another command on the wire. Wildcards are refused too.

    Raises:
        ValueError
    """
    if _is_subject(subject) is None:
        raise ValueError(f"not a subject: {subject!r}")


def check_pattern(pattern: str) -> None:
    """Refuses subscriptions with empty tokens or misplaced wildcards: a server would end the connection.

    Raises:
        ValueError
    """
    if _is_pattern(pattern) is None:
        raise ValueError(f"not a subject to subscribe to: {pattern!r}")


def header_block(headers: Mapping[str, str] | None) -> bytes:
    """Headers as they cross the wire; empty without any. Line breaks in values become spaces.

    Raises:
        ValueError: a name that HTTP would not allow.
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
    """The headers in what `header_block` or a server has written; a status on the first line is the header `STATUS`.

    What is not UTF-8 is replaced, and lines without a colon are passed over.
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
    """Calls a handler. Whatever it raises is logged, so that one bad message does not silence a subscription."""
    try:
        handler(message)
    except (Exception, asyncio.CancelledError):
        log.exception("handler_failed", subject=message.subject)
