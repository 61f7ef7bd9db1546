"""The client of nats-py, mended: what it does wrong under load, on cancellation and in outages is known only here."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from nats import errors
from nats.aio.client import Client, Server
from nats.aio.subscription import Subscription
from nats.protocol.command import sub_cmd, unsub_cmd

from pagewire.shared.bus.framing import deliver, read_headers
from pagewire.shared.bus.nats_parser import BulkParser
from pagewire.shared.bus.protocol import Handler, Message
from pagewire.shared.errors import BusUnavailable, ConfigurationError

PING_INTERVAL = 1.0
"""Seconds; a frozen server is noticed after three."""
PING = b"PING\r\n"
PERMISSIONS = "permissions violation"


class Interest(Subscription):  # type: ignore[misc]
    """A subscription whose handler is called by the read loop itself: no queue, no task, hence no end of either."""

    def __init__(self, client: Client, sid: int, subject: str, queue: str, handler: Handler) -> None:
        super().__init__(client, sid, subject, queue=queue)
        self.handler = handler


class MendedClient(Client):  # type: ignore[misc]
    """nats-py's client with synchronous publishing and delivery.

    What differs from its parent:
        - A ping goes through the same buffer as everything else, so that its answer is a barrier for what was
          published and subscribed before.
        - An answer to a ping that nobody awaits any more does not end the read loop.
        - Messages take a shorter way through the parser, and so do their headers.
        - Handlers run in the read loop: the socket is their only queue, and no exception of theirs stops a
          subscription.
        - Publishing appends to a buffer and wakes the flusher. It never waits; `backlog` is for the caller to bound.
        - An error that the server reports costs the connection, which is made again, and never closes the client.
        - A connection that is given up is cut: the parent waits for its peer to read what is left.
    """

    def __init__(
        self, on_refusal: Callable[[str], None], on_lost: Callable[[str], None], on_restored: Callable[[], None]
    ) -> None:
        """A client that is yet to connect.

        Args:
            on_refusal: called with what the server says when a permission is missing, in lower case.
            on_lost: called with the reason when the connection breaks.
            on_restored: called when there is one again and the server knows the subscriptions.
        """
        super().__init__()
        self._ps = BulkParser(self, self._deliver)
        self._on_refusal = on_refusal
        self._on_lost = on_lost
        self._on_restored = on_restored
        self._last_error = "it does not answer"

    async def open(self, url: str, name: str, user: str, password: str, connect_timeout: float) -> None:
        """Makes the first connection; from then on, a lost one is made again for ever.

        Raises:
            BusUnavailable: no server answered within `connect_timeout` seconds.
            ConfigurationError: the server refuses the credentials.
        """
        address = address_of(url)
        try:
            async with asyncio.timeout(connect_timeout):
                await self.connect(
                    url,
                    name=name,
                    user=user or None,
                    password=password or None,
                    allow_reconnect=False,  # lets a refusal end the first attempt
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.1,
                    reconnect_to_server_handler=_next_server,
                    ping_interval=PING_INTERVAL,
                    pending_size=0,  # the parent's own bound blocks its read loop
                    error_cb=self._note_error,
                    disconnected_cb=self._note_loss,
                    reconnected_cb=self._note_return,
                )
        except TimeoutError:
            raise BusUnavailable(f"no NATS server answers at {address}: {self._last_error}") from None
        except errors.Error as error:
            if "authorization" in str(error).lower():
                raise ConfigurationError(f"the NATS server at {address} refuses these credentials") from None
            raise BusUnavailable(f"no NATS server answers at {address}: {error}") from None
        self.options["allow_reconnect"] = True

    def push(self, command: bytes) -> None:
        """Appends a command to what is sent next."""
        self._pending.append(command)
        self._pending_data_size += len(command)
        if self.is_connected and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    def backlog(self) -> int:
        """Bytes in the buffer and in the socket's own."""
        writer = self._transport._io_writer if self._transport else None
        unsent = writer.transport.get_write_buffer_size() if writer is not None else 0
        return int(self._pending_data_size + unsent)

    def add_interest(self, subject: str, queue: str, handler: Handler) -> Interest:
        """Subscribes; also again after every reconnection."""
        self._sid += 1
        interest = Interest(self, self._sid, subject, queue, handler)
        self._subs[self._sid] = interest
        self.push(sub_cmd(subject, queue, self._sid))
        return interest

    def end_interest(self, interest: Interest) -> asyncio.Future[bool]:
        """Unsubscribes. When the future is done, what the server sent before it knew has been delivered."""
        self.push(unsub_cmd(interest._id, 0))
        barrier = self.ping()
        barrier.add_done_callback(lambda _: self._subs.pop(interest._id, None))
        return barrier

    def ping(self) -> asyncio.Future[bool]:
        """A barrier: done when the server has taken in everything pushed before, cancelled without a connection."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.is_connected:
            self._pongs.append(answer)
            self.push(PING)
        else:
            answer.cancel()
        return answer

    def cut(self) -> None:
        """Ends the connection at once, with whatever is unsent."""
        if self._transport:
            self._transport._io_writer.transport.abort()

    async def shut(self, within: float) -> None:
        """Closes for good; a peer that has not read the rest after `within` seconds is cut off."""
        if not self.is_connected:
            self._pending.clear()  # uvloop refuses to write to a closed socket
            self._pending_data_size = 0
        watchdog = asyncio.get_running_loop().call_later(within, self.cut)
        try:
            with suppress(OSError):
                await self.close()
        finally:
            watchdog.cancel()

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self.push(PING)

    async def _process_pong(self) -> None:
        self._pings_outstanding = 0
        if self._pongs:
            answer = self._pongs.pop(0)
            if not answer.done():
                answer.set_result(True)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._deliver(sid, subject, reply, data, headers or b"")

    def _deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        interest = self._subs.get(sid)
        if interest is not None:
            named = read_headers(headers) if headers else {}
            deliver(interest.handler, Message(subject.decode(), data, reply.decode(), named))

    async def _process_err(self, err_msg: str) -> None:
        if PERMISSIONS in err_msg:
            self._on_refusal(err_msg.strip("'"))
        else:
            await self._process_op_err(errors.Error(f"nats: {err_msg}"))

    async def _process_op_err(self, e: Exception) -> None:
        if not (self.is_closed or self.is_reconnecting):
            await self._error_cb(e)
            self.cut()
        await super()._process_op_err(e)

    async def _note_error(self, error: Exception) -> None:
        """Must not raise: the parent's read loop would end while the client looks connected."""
        self._last_error = str(error) or type(error).__name__

    async def _note_loss(self) -> None:
        """Pings that are left in the buffer would be answered on the next connection, for later ones."""
        for answer in self._pongs:
            answer.cancel()
        self._pongs: list[asyncio.Future[bool]] = []
        self._pending: list[bytes] = [command for command in self._pending if command is not PING]
        self._pending_data_size = sum(map(len, self._pending))
        self._on_lost(self._last_error)

    async def _note_return(self) -> None:
        self._on_restored()


def address_of(url: str) -> str:
    """Host and port, without credentials.

    Raises:
        ConfigurationError: the URL is not like nats://host:port.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 4222
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme not in {"nats", "tls"}:
        raise ConfigurationError(f"the address of a NATS server is like nats://127.0.0.1:4222, not {url!r}")
    return f"{host}:{port}"


def _next_server(servers: list[Server], info: dict[str, object]) -> tuple[Server, float]:
    """The least tried server, and the seconds to wait before: 50 ms doubling to 1 s, spread by half."""
    server = min(servers, key=lambda known: known.reconnects)
    return server, min(0.05 * 2 ** min(server.reconnects, 10), 1.0) * (0.5 + random.random())
