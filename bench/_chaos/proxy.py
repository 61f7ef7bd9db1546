"""A TCP proxy between a service and the broker, which can cut the service off as a lost network does."""

import asyncio
from contextlib import suppress
from typing import Self

HOST = "127.0.0.1"
CHUNK = 1 << 16
"""Bytes that are read at once."""


class Proxy:
    """Forwards connections to a port of this machine, `async with Proxy(port) as proxy`.

    While it is cut, nothing passes in either direction, and nobody is told: connections stay open, new ones are
    accepted and get no answer, and what was sent arrives after the cut, as TCP repeats it.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The URL of the broker through this proxy."""
        assert self._server is not None, "the proxy was not started"
        return f"nats://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Lets nothing pass from now on."""
        self._whole.clear()

    def mend(self) -> None:
        """Lets everything pass again."""
        self._whole.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._connect(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._whole.wait()
            try:
                there, back = await asyncio.open_connection(HOST, self._target)
            except OSError:  # the broker is down: the service sees its connection end
                return
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._forward(reader, back))
                    both.create_task(self._forward(there, writer))
            finally:
                back.close()
        finally:
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one direction until it ends, and then ends the other one with it."""
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        await self._whole.wait()
        writer.close()
