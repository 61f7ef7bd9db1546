"""The HTTP server of the application."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pagewire.shared.listener import BACKLOG
from pagewire.shared.polling import poll

CLOSE_TIMEOUT = 3
"""Seconds that open requests have to end when the server is stopped."""


class Server:
    """Serves an application."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _Server(_config(app))

    async def run(self) -> None:
        """Serves until cancelled, then gives open requests `CLOSE_TIMEOUT` seconds to end."""
        serving = asyncio.create_task(self._server.serve([self._listener]))
        try:
            await asyncio.shield(serving)
        finally:
            self._server.should_exit = True
            await asyncio.wait({serving})

    async def leave(self) -> None:
        """Accepts no more connections, and waits until the open ones are closed."""
        if self._server.started:
            for listening in self._server.servers:
                listening.close()
        await poll(lambda: not self._server.server_state.connections)


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",  # not detected automatically, since the application is no coroutine function
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # client addresses are not used
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=CLOSE_TIMEOUT,
    )


class _Server(uvicorn.Server):
    """Leaves signal handling to `pagewire.shared.runtime`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
