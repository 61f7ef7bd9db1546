"""The HTTP server of the application."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pagewire.shared.errors import ConfigurationError

CLOSE_TIMEOUT = 3
"""Seconds that open requests have to end when the server is stopped."""
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 chooses a free port.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error


async def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Serves until cancelled, then gives open requests `CLOSE_TIMEOUT` seconds to end."""
    config = uvicorn.Config(
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
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await asyncio.wait({serving})


class _Server(uvicorn.Server):
    """Leaves signal handling to `pagewire.shared.runtime`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
