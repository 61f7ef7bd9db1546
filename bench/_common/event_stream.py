"""Reads the events of an HTTP answer. An HTTP library would take a core's time for what a load generator measures."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from pagewire.shared.errors import ConfigurationError

CHUNK = 1 << 16
"""Bytes that are read at once."""


async def post(url: str, body: dict[str, Any], api_key: str = "") -> AsyncGenerator[dict[str, Any], None]:
    """Yields the server-sent events that answer a request, as they come, on a connection of its own.

    The URL may begin with https: the certificate must come from an authority that the system, or the file that the
    variable SSL_CERT_FILE names, trusts.

    Raises:
        ConfigurationError: the server cannot be reached, refuses the request, or breaks off.
    """
    where = urlsplit(url)
    data = json.dumps(body).encode()
    head = (
        f"POST {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        + (f"Authorization: Bearer {api_key}\r\n\r\n" if api_key else "\r\n")
    )
    answer = _Answer()
    parser = HttpResponseParser(answer)
    try:
        tls = where.scheme == "https"
        reader, writer = await asyncio.open_connection(where.hostname, where.port or (443 if tls else 80), ssl=tls)
        try:
            writer.write(head.encode() + data)
            while not answer.complete and (chunk := await reader.read(CHUNK)):
                parser.feed_data(chunk)
                if parser.get_status_code() == 200:
                    events, answer.body = split_events(answer.body)
                    for event in events:
                        yield event
        finally:
            writer.close()
    except (OSError, HttpParserError) as error:
        raise ConfigurationError(f"{url} does not answer: {error}") from error
    if parser.get_status_code() != 200:
        raise ConfigurationError(f"{url} refuses the request: {answer.body.decode(errors='replace')[:500]}")
    if not answer.complete:
        raise ConfigurationError(f"{url} has broken off its answer")


class _Answer:
    """Collects the body of an answer; the parser calls its methods."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, body: bytes) -> None:
        """Takes the next part."""
        self.body += body

    def on_message_complete(self) -> None:
        """Notes the end."""
        self.complete = True


def split_events(body: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Returns the complete events of a body, without the mark at the end of the stream, and the rest of the body.

    >>> split_events(b'data: {"a": 1}\\n\\ndata: {"a"')
    ([{'a': 1}], b'data: {"a"')
    """
    *lines, rest = body.split(b"\n")
    data = [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
    return [json.loads(event) for event in data if event not in {b"", b"[DONE]"}], rest
