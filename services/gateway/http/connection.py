"""The HTTP connection of one request: reading its body and noticing that the client has disconnected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope

from pagewire.shared.errors import PayloadTooLarge, RequestError


class ClientGone(Exception):
    """The client has disconnected, so that no response can be sent."""


class UnsupportedEncoding(RequestError):
    """The body of a request has a Content-Encoding that is not taken."""

    code, kind = 415, "unsupported_encoding"


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Returns the whole body; reads nothing if its header says that it is too large.

    Raises:
        UnsupportedEncoding: the body is compressed.
        PayloadTooLarge: the body has more than `limit` bytes.
        ClientGone: the client disconnected before the end of the body.
    """
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity").strip().lower() not in {b"identity", b""}:
        raise UnsupportedEncoding("the body is compressed: send it without Content-Encoding")
    if int(headers.get(b"content-length", b"0")) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancels its block when the client disconnects. The body must have been read before.

    Raises:
        ClientGone: the client has disconnected.
    """

    async def watch(scope: asyncio.Timeout) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(None) as scope:
            watching = asyncio.create_task(watch(scope))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        raise ClientGone from None


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body has more than {limit} bytes, the broker's limit: send a smaller request")
