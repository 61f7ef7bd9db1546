"""Inboxes, and requests over them: one subscription per connection, told apart by their subject's last token."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from shared.bus.framing import NO_RESPONDERS, STATUS
from shared.bus.protocol import Bus, Handler, Headers, Message
from shared.errors import BusError, BusUnavailable, ConnectionLost, NoResponders, RequestTimeout

REPLY_LIMIT = 65_536
"""Replies that one request may leave unread; past it the reader has fallen behind for good."""


class Exchange:
    """One request and the replies to it, in order of arrival."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.closed = False
        """Whether nobody waits for replies any more."""
        self._arrived: deque[Message] = deque()
        self._error: BusError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: Message) -> None:
        """Takes in a reply."""
        if len(self._arrived) < REPLY_LIMIT:
            self._arrived.append(message)
            self._wake()
        else:
            self.fail(BusUnavailable(f"the replies of {self.subject} arrive faster than they are read"))

    def fail(self, error: BusError) -> None:
        """Lets the reader meet `error` behind the replies that have arrived."""
        self._error = self._error or error
        self._wake()

    async def next(self, timeout: float) -> Message:
        """The next reply.

        Raises:
            NoResponders, RequestTimeout: none came within `timeout` seconds.
            BusError: what `fail` was given.
        """
        if not self._arrived and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._waiter
            except TimeoutError:
                raise RequestTimeout(f"no reply from {self.subject} within {timeout:g} s") from None
            finally:
                self._waiter = None
        if not self._arrived:
            assert self._error is not None
            raise self._error
        message = self._arrived.popleft()
        if message.headers.get(STATUS) == NO_RESPONDERS:
            raise NoResponders(f"nobody subscribes to {self.subject}")
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Requests:
    """The inboxes and the open requests of one connection. The bus subscribes `receive` to `pattern`."""

    def __init__(self, bus: Bus, inbox: str) -> None:
        self.pattern = f"{inbox}.*"
        self._bus = bus
        self._prefix = f"{inbox}."
        self._handlers: dict[str, Handler] = {}
        self._exchanges: set[Exchange] = set()
        self._tokens = itertools.count()

    def receive(self, message: Message) -> None:
        """Handler of the subscription."""
        handler = self._handlers.get(message.subject[len(self._prefix) :])
        if handler is not None:
            handler(message)

    def fail(self, error: BusError, subject: str = "") -> None:
        """Fails the open requests to `subject` (in lower case, as servers report it), or all of them."""
        for exchange in self._exchanges:
            if not subject or exchange.subject.lower() == subject:
                exchange.fail(error)

    @contextmanager
    def inbox(self, handler: Handler) -> Iterator[str]:
        """See `Bus.inbox`."""
        self._check_connected()
        token = str(next(self._tokens))
        self._handlers[token] = handler
        try:
            yield self._prefix + token
        finally:
            del self._handlers[token]

    @contextmanager
    def open(self, subject: str) -> Iterator[Exchange]:
        """Holds an exchange open.

        Raises:
            ConnectionLost: there is none. A request is not kept for the next one: its time would run out.
        """
        self._check_connected()
        exchange = Exchange(subject)
        self._exchanges.add(exchange)
        try:
            yield exchange
        finally:
            exchange.closed = True
            self._exchanges.remove(exchange)

    @contextmanager
    def exchange(self, subject: str, data: bytes, headers: Headers | None) -> Iterator[Exchange]:
        """Publishes a request whose replies go to an inbox of its own."""
        with self.open(subject) as exchange, self.inbox(exchange.put) as reply:
            self._bus.publish(subject, data, reply=reply, headers=headers)
            yield exchange

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None) -> Message:
        """See `Bus.request`."""
        with self.exchange(subject, data, headers) as exchange:
            return await exchange.next(timeout)

    async def request_many(
        self, subject: str, data: bytes, *, stall: float, headers: Headers | None
    ) -> AsyncIterator[Message]:
        """See `Bus.request_many`."""
        with self.exchange(subject, data, headers) as exchange:
            while (message := await exchange.next(stall)).data:
                yield message

    def _check_connected(self) -> None:
        if not self._bus.connected:
            raise ConnectionLost("there is no connection to the broker")
