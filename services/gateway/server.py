"""The HTTP server around the application."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pagewire.shared.errors import ConfigurationError

CLOSE_WITHIN = 3
"""Seconds that open requests have to end when the server is stopped."""
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error


async def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Serves until cancelled; then open requests have `CLOSE_WITHIN` seconds to end."""
    config = uvicorn.Config(
        app,
        interface="asgi3",  # it guesses wrong where no coroutine function is called, but what returns a coroutine
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nobody asks where a request came from
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=CLOSE_WITHIN,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await asyncio.wait({serving})


class _Server(uvicorn.Server):
    """Leaves the signals to `pagewire.shared.runtime`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
