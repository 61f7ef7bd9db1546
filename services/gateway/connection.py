"""The HTTP connection of one request: reading its body and noticing that the client has disconnected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from pagewire.shared.errors import PayloadTooLarge


class ClientGone(Exception):
    """The client has disconnected, so that no response can be sent."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """Reads the whole body.

    Raises:
        PayloadTooLarge: the body has more than `limit` bytes.
        ClientGone: the client disconnected before the end of the body.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise PayloadTooLarge(f"the body has more than {limit} bytes, the broker's limit: send a smaller request")
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
