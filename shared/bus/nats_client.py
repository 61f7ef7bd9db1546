"""nats-py's client with its defects under load, on cancellation and during outages worked around."""

import asyncio
import random
import ssl
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from nats import errors
from nats.aio.client import Client, Server
from nats.aio.subscription import Subscription
from nats.protocol.command import sub_cmd, unsub_cmd
from typing_extensions import override

from pagewire.shared.bus.framing import deliver, read_headers
from pagewire.shared.bus.nats_parser import BulkParser
from pagewire.shared.bus.protocol import Handler, Message
from pagewire.shared.errors import BusUnavailable, ConfigurationError

PING_INTERVAL = 1.0
"""Seconds between two pings; three pings without an answer end the connection to a frozen server."""
CLOSE_GRACE = 0.2
"""Seconds within which an aborted connection must close."""
CLUSTER_PING_INTERVAL = 0.3
"""Seconds between two pings to a server of a cluster. It is short, because a service whose server is frozen must reach
another one before its own silence makes it count as gone (`process.peers.SILENCE`)."""
HANDSHAKE_TIMEOUT = 2.0
"""Seconds within which a server must accept a connection."""
CLUSTER_HANDSHAKE_TIMEOUT = 1.0
"""Seconds within which a server of a cluster must accept a connection, before the next one is tried."""
PING = b"PING\r\n"
PERMISSIONS = "permissions violation"


class TlsRefused(errors.Error):  # type: ignore[misc]
    """The server has no TLS, though the client wants it."""


class HandlerSubscription(Subscription):  # type: ignore[misc]
    """A nats-py subscription whose handler is called by the read loop itself, so it has neither a queue nor a task."""

    def __init__(self, client: Client, sid: int, subject: str, queue: str, handler: Handler) -> None:
        super().__init__(client, sid, subject, queue=queue)
        self.handler = handler


class NatsClient(Client):  # type: ignore[misc]
    """nats-py's client with synchronous publishing and delivery.

    Differences from nats-py's `Client`:
        - A ping goes through the same buffer as every other command, so that its answer is a barrier: the server has
          processed everything that was published and subscribed before the ping.
        - The answer to a ping whose waiter has been cancelled does not end the read loop.
        - `BulkParser` parses messages and their headers at a lower cost.
        - Handlers run in the read loop: the socket is their only queue, and an exception in a handler does not end
          its subscription.
        - Publishing appends to a buffer and wakes the flusher. It never waits; the caller bounds `backlog`.
        - After an error from the server the client reconnects. nats-py closes the client.
        - A connection that has failed is aborted. nats-py waits until the server has read the rest of the buffer.
        - After a failure, another server is tried before the one that has just failed.
    """

    def __init__(
        self, on_denied: Callable[[str], None], on_disconnect: Callable[[str], None], on_reconnect: Callable[[], None]
    ) -> None:
        """`on_denied` gets the server's message in lower case, `on_disconnect` the reason of a loss, maybe twice."""
        super().__init__()
        self._ps = BulkParser(self, self._deliver)
        self._on_denied = on_denied
        self._on_disconnect = on_disconnect
        self._on_reconnect = on_reconnect
        self._last_error = "it does not answer"
        self._wants_tls = False
        self._opened = False

    async def open(
        self, url: str, name: str, user: str, password: str, connect_timeout: float, tls: ssl.SSLContext | None
    ) -> None:
        """Connects for the first time; afterwards the client reconnects whenever the connection is lost.

        `url` lists one server, or several of a cluster, separated by commas.

        Raises:
            BusUnavailable: no server answered within `connect_timeout` seconds.
            ConfigurationError: `url` is malformed, or a server refuses the credentials, or it has no TLS or one that is
                refused.
        """
        urls = urls_of(url)
        addresses = ", ".join(map(address_of, urls))
        several = len(urls) > 1
        self._wants_tls = tls is not None or any(server.startswith("tls:") for server in urls)
        try:
            async with asyncio.timeout(connect_timeout):
                await self.connect(
                    urls,
                    name=name,
                    **(self._login_in(urls) if not user else {"user": user, "password": password or None}),
                    tls=tls,
                    max_reconnect_attempts=-1,
                    connect_timeout=connect_timeout / len(urls) if several else HANDSHAKE_TIMEOUT,
                    reconnect_time_wait=0.1,
                    reconnect_to_server_handler=_next_server,
                    ping_interval=CLUSTER_PING_INTERVAL if several else PING_INTERVAL,
                    pending_size=0,  # nats-py's own bound blocks its read loop
                    error_cb=self._handle_error,
                    disconnected_cb=self._handle_disconnect,
                    reconnected_cb=self._handle_reconnect,
                )
        except TimeoutError:
            raise BusUnavailable(f"no NATS server answers at {addresses}: {self._last_error}") from None
        except (ssl.SSLError, TlsRefused) as error:
            raise ConfigurationError(f"no TLS with the NATS server at {addresses}: {error}") from None
        except OSError as error:
            reason = f"the NATS server at {addresses} has ended the connection"
            raise BusUnavailable(f"{reason}: it wants a certificate that it trusts: {error}") from None
        except errors.Error as error:
            if "authorization" in str(error).lower():
                raise ConfigurationError(f"the NATS server at {addresses} refuses these credentials") from None
            raise BusUnavailable(f"no NATS server answers at {addresses}: {error}") from None
        self._opened = True
        if several:
            self.options["connect_timeout"] = CLUSTER_HANDSHAKE_TIMEOUT

    def _login_in(self, urls: list[str]) -> dict[str, Callable[[], str]]:
        """Returns the options of nats-py that send the user and password, or the token, in the current server's URL.

        Reserved characters in them are percent-encoded, which nats-py leaves as they are.
        """

        def decoded(part: str) -> Callable[[], str]:
            return lambda: unquote(getattr(self._current_server.uri, part) or "") if self._current_server else ""

        servers = [urlsplit(url) for url in urls]
        if any(server.password is not None for server in servers):
            return {"user": decoded("username"), "password": decoded("password")}
        return {"token": decoded("username")} if any(server.username for server in servers) else {}

    @property
    def address(self) -> str:
        """Host and port of the server that it is connected to, or was connected to last."""
        return str(self._current_server.uri.netloc.rpartition("@")[2]) if self._current_server is not None else ""

    def send(self, command: bytes) -> None:
        """Appends a command to the outbound buffer and wakes the flusher."""
        self._pending.append(command)
        self._pending_data_size += len(command)
        if self.is_connected and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    def backlog(self) -> int:
        """Returns the bytes in the outbound buffer and in the socket's buffer."""
        writer = self._transport._io_writer if self._transport else None
        unsent = writer.transport.get_write_buffer_size() if writer is not None else 0
        return int(self._pending_data_size + unsent)

    def add_subscription(self, subject: str, queue: str, handler: Handler) -> HandlerSubscription:
        """Subscribes now and again after every reconnection."""
        self._sid += 1
        subscription = HandlerSubscription(self, self._sid, subject, queue, handler)
        self._subs[self._sid] = subscription
        self.send(sub_cmd(subject, queue, self._sid))
        return subscription

    def end_subscription(self, subscription: HandlerSubscription) -> asyncio.Future[bool]:
        """Unsubscribes. The future is done once every message that the server had sent by then is delivered."""
        self.send(unsub_cmd(subscription._id, 0))
        barrier = self.ping()
        barrier.add_done_callback(lambda _: self._subs.pop(subscription._id, None))
        return barrier

    def ping(self) -> asyncio.Future[bool]:
        """Returns a barrier: done when the server has processed the commands before, cancelled without a connection."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.is_connected:
            self._pongs.append(answer)
            self.send(PING)
        else:
            answer.cancel()
        return answer

    def abort(self) -> None:
        """Ends the connection at once and drops unsent data."""
        if self._transport and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()

    async def close_within(self, timeout: float) -> None:
        """Closes the client; aborts the connection if the server has not read the rest after `timeout` seconds.

        After a TLS handshake that has failed, nats-py waits without end for the connection to be closed.
        """
        if not self.is_connected:
            self._pending.clear()  # uvloop refuses to write to a closed socket
            self._pending_data_size = 0
        abort = asyncio.get_running_loop().call_later(timeout, self.abort)
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(timeout + CLOSE_GRACE):
                    await self.close()
        finally:
            abort.cancel()

    @override
    async def _connect_to_server(self, s: object) -> None:
        self.abort()  # nats-py forgets a connection that a frozen server has taken
        await super()._connect_to_server(s)

    @override
    async def _process_info(self, info: dict[str, object], initial_connection: bool = False) -> None:
        """Refuses a server without TLS before nats-py would send it the password in plain text."""
        if initial_connection and self._wants_tls and not info.get("tls_required"):
            raise TlsRefused("the server does not offer it")
        await super()._process_info(info, initial_connection)

    @override
    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self.send(PING)

    @override
    async def _process_pong(self) -> None:
        self._pings_outstanding = 0
        if self._pongs:
            answer = self._pongs.pop(0)
            if not answer.done():
                answer.set_result(True)

    @override
    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._deliver(sid, subject, reply, data, headers or b"")

    def _deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = self._subs.get(sid)
        if subscription is not None:
            parsed = read_headers(headers) if headers else {}
            deliver(subscription.handler, Message(subject.decode(), data, reply.decode(), parsed))

    @override
    async def _process_err(self, err_msg: str) -> None:
        if PERMISSIONS in err_msg:
            self._on_denied(err_msg.strip("'"))
        else:
            await self._process_op_err(errors.Error(f"nats: {err_msg}"))

    @override
    async def _process_op_err(self, e: Exception) -> None:
        if not (self.is_closed or self.is_reconnecting):
            await self._error_cb(e)
            self.abort()
        await super()._process_op_err(e)
        if self.is_reconnecting:  # nats-py itself says so only some turns of the loop later
            self._on_disconnect(self._last_error)

    async def _handle_error(self, error: Exception) -> None:
        """Must not raise once connected: that would end nats-py's read loop while the client still looks connected.

        Before, a refusal is raised, so that it ends the first connection: another attempt would be refused, too.
        """
        self._last_error = str(error) or type(error).__name__
        if not self._opened and self._is_refusal(error):
            raise error

    def _is_refusal(self, error: Exception) -> bool:
        """Returns whether a server refuses the credentials or the certificate, or TLS with it is impossible."""
        if isinstance(error, (ConnectionResetError, BrokenPipeError)) and self._server_info.get("tls_verify"):
            return True  # a server that does not trust the certificate only ends the connection
        return isinstance(error, (ssl.SSLError, TlsRefused)) or "authorization" in str(error).lower()

    async def _handle_disconnect(self) -> None:
        """Drops unsent pings: on the next connection their answers would be taken for those of later pings."""
        for answer in self._pongs:
            answer.cancel()
        self._pongs: list[asyncio.Future[bool]] = []
        self._pending: list[bytes] = [command for command in self._pending if command is not PING]
        self._pending_data_size = sum(map(len, self._pending))
        if len(self._server_pool) > 1 and self._current_server is not None:
            self._current_server.reconnects += 1  # `_next_server` prefers the others
        self._on_disconnect(self._last_error)

    async def _handle_reconnect(self) -> None:
        self._on_reconnect()


def urls_of(urls: str) -> list[str]:
    """Returns the URLs of a comma-separated list.

    Raises:
        ConfigurationError: one of them does not have the form nats://host:port.
    """
    listed = [url.strip() for url in urls.split(",")]
    for url in listed:
        address_of(url)
    return listed


def address_of(url: str) -> str:
    """Returns host and port of a URL, without credentials.

    Raises:
        ConfigurationError: the URL does not have the form nats://host:port.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 4222
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme not in {"nats", "tls"}:
        raise ConfigurationError(f"{url!r} is not the address of a NATS server: give one like nats://127.0.0.1:4222")
    return f"{host}:{port}"


def _next_server(servers: list[Server], info: dict[str, object]) -> tuple[Server, float]:
    """Returns the server with the fewest attempts, and the delay: 50 ms doubling up to 1 s, with 50 % jitter."""
    server = min(servers, key=lambda candidate: candidate.reconnects)
    return server, min(0.05 * 2 ** min(server.reconnects, 10), 1.0) * (0.5 + random.random())
