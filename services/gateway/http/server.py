"""The HTTP server of the application."""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from pagewire.services.gateway.http.http_protocol import ConnectionLimits, Connections, LimitedProtocol
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process.listener import BACKLOG
from pagewire.shared.process.polling import poll
from pagewire.shared.settings.config import Settings

CLOSE_TIMEOUT = 3
"""Seconds that open requests have to end when the server is stopped."""
DATE_INTERVAL = 1.0
"""Seconds between two changes of the header `Date`, which counts seconds."""
OTHER_FILES = 128
"""Files that the process needs beside its connections."""

logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # no line for each bad request


class Server:
    """Serves an application."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        connections: Connections,
        tls: ssl.SSLContext | None = None,
        detach: Callable[[], None] = lambda: None,
    ) -> None:
        """`detach` ends the answers to open requests, which go on in the pipeline."""
        self._detach = detach
        self._listener = listener
        self._connections = connections
        self._server = _Server(_config(app, connections), connections, tls)

    async def run(self) -> None:
        """Serves until cancelled, then gives open requests `CLOSE_TIMEOUT` seconds to end before it ends them."""
        serving = asyncio.create_task(self._server.serve([self._listener]))
        enforcing = asyncio.create_task(self._connections.enforce())
        try:
            await asyncio.shield(serving)
        finally:
            self._server.stop()
            await asyncio.wait({serving}, timeout=CLOSE_TIMEOUT)
            self._detach()
            await asyncio.wait({serving})
            self._connections.abort()
            enforcing.cancel()
            await asyncio.wait({enforcing})

    async def leave(self) -> None:
        """Accepts no more connections, and waits until the open ones are closed; idle ones soon are."""
        if self._server.started:
            for listening in self._server.servers:
                listening.close()
        self._connections.hurry()
        await poll(lambda: not self._connections.open)


def limits_of(settings: Settings) -> ConnectionLimits:
    """Returns the limits of connections, after raising the process's limit on open files as far as they need it.

    Raises:
        ConfigurationError: so many connections cannot be open in this process.
    """
    files = settings.max_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        if hard != resource.RLIM_INFINITY and hard < files:
            raise ConfigurationError(
                f"--max-connections {settings.max_connections} needs {files} open files, the system allows {hard}: "
                f"set at most {hard - OTHER_FILES}, or raise the limit (ulimit -n)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return ConnectionLimits(connections=settings.max_connections)


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Returns the settings of TLS; None without a certificate.

    Raises:
        ConfigurationError: a file is missing, cannot be read, or does not fit the others.
    """
    certificate, key, authorities = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
    if not certificate:
        if key or authorities:
            raise ConfigurationError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile, the server's certificate")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key or None, password="")  # a key with a passphrase asks nobody
        if authorities:
            context.load_verify_locations(authorities)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = ", ".join(filter(None, (certificate, key, authorities)))
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"the TLS files {files} cannot be used: {reason}") from None
    return context


def _config(app: ASGIApp, connections: Connections) -> uvicorn.Config:
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
        timeout_keep_alive=3600,  # `Connections` closes idle connections sooner
        timeout_graceful_shutdown=CLOSE_TIMEOUT + 1,
    )


class _Server(uvicorn.Server):
    """Accepts limited connections, and leaves signal handling to `pagewire.shared.process.runtime`."""

    def __init__(self, config: uvicorn.Config, connections: Connections, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._connections = connections
        self._tls = tls
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Ends the server once its open requests have ended."""
        self.should_exit = True
        self._stopped.set()

    @override
    async def main_loop(self) -> None:
        """Keeps the header `Date` until `stop`. Uvicorn's own loop wakes ten times a second."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(DATE_INTERVAL):
                    await self._stopped.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens like uvicorn's, with limited connections and a limit on the time of a TLS handshake."""
        limits, tls = self._connections.limits, self._tls
        self.servers = [
            await asyncio.get_running_loop().create_server(
                lambda: LimitedProtocol(self.config, self.server_state, {}, self._connections),
                sock=listener,
                ssl=tls,
                backlog=BACKLOG,
                ssl_handshake_timeout=limits.header_time if tls is not None else None,
                ssl_shutdown_timeout=limits.close_time if tls is not None else None,
            )
            for listener in sockets or []
        ]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
