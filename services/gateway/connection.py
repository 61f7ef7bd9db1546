"""The HTTP connection of one request: its body, and whether its client is still there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from pagewire.shared.errors import PayloadTooLarge


class ClientGone(Exception):
    """The client has hung up: nobody is left to be answered."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body.

    Raises:
        PayloadTooLarge: it has more than `limit` bytes.
        ClientGone: the client went before it had sent everything.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise PayloadTooLarge(f"the body has more than {limit} bytes, which is what the broker takes")
        if not message.get("more_body", False):
            return bytes(body)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancels its block when the client hangs up. To be used after the body was read.

    Raises:
        ClientGone: the client has gone.
    """

    async def watch(cut: asyncio.Timeout) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cut.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(None) as cut:
            watching = asyncio.create_task(watch(cut))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        raise ClientGone from None
