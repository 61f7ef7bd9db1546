"""The client of nats-py, mended: what it does wrong under load, on cancellation and in outages is known only here."""

import asyncio
from collections.abc import Callable

from nats import errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.command import sub_cmd, unsub_cmd

from shared.bus.framing import deliver
from shared.bus.protocol import Handler, Message

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
        - Handlers run in the read loop: the socket is their only queue, and no exception of theirs stops a
          subscription.
        - Publishing appends to a buffer and wakes the flusher. It never waits; `backlog` is for the caller to bound.
        - An error that the server reports costs the connection, which is made again, and never closes the client.
        - A connection that is given up is cut: the parent waits for its peer to read what is left.
    """

    def __init__(self, on_refusal: Callable[[str], None]) -> None:
        super().__init__()
        self._on_refusal = on_refusal
        """Called with what the server says when a permission is missing, in lower case."""

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

    def forget_pings(self) -> None:
        """After a lost connection: pings left in the buffer would be answered on the next one, for later ones."""
        for answer in self._pongs:
            answer.cancel()
        self._pongs: list[asyncio.Future[bool]] = []
        self._pending: list[bytes] = [command for command in self._pending if command is not PING]
        self._pending_data_size = sum(map(len, self._pending))

    def cut(self) -> None:
        """Ends the connection at once, with whatever is unsent."""
        if self._transport:
            self._transport._io_writer.transport.abort()

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
        interest = self._subs.get(sid)
        if interest is not None:
            parsed = await self._process_headers(headers) if headers else None
            deliver(interest.handler, Message(subject.decode(), data, reply.decode(), parsed or {}))

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
