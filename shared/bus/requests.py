"""Inboxes and requests. A connection has one subscription for all; the last token of a subject is the inbox's id."""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager

from typing_extensions import override

from pagewire.shared.bus.framing import NO_RESPONDERS, STATUS
from pagewire.shared.bus.protocol import Bus, Handler, Headers, Message
from pagewire.shared.errors import BusError, BusUnavailable, ConnectionLost, NoResponders, RequestTimeout

REPLY_LIMIT = 65_536
"""Maximum number of unread replies to one request; a reader that is further behind gets an error."""
LAST_LOOK = 0.05
"""Seconds for which a wait for the broker goes on after its time: an event loop that stood still, on a busy machine,
sees that the time is over before it reads what has arrived meanwhile."""


class Exchange:
    """One request and its replies in order of arrival. It is open inside its `with` block.

    The context manager and the timer are written by hand: every request uses them several times, and
    `contextlib.contextmanager` and `asyncio.timeout` cost more than the messages themselves.
    """

    __slots__ = ("_arrived", "_error", "_requests", "_timer", "_waiter", "closed", "subject")

    def __init__(self, requests: "Requests", subject: str) -> None:
        self.subject = subject
        self.closed = False
        """Whether the block has ended, so that nobody reads replies any more."""
        self._requests = requests
        self._arrived: deque[Message] = deque()
        self._error: BusError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> "Exchange":
        """Raises ConnectionLost without a connection: a request kept until the reconnection would arrive too late."""
        self._requests.check_connected()
        self._requests.exchanges.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        self._requests.exchanges.remove(self)

    def put(self, message: Message) -> None:
        """Adds a reply."""
        if len(self._arrived) < REPLY_LIMIT:
            self._arrived.append(message)
            self._wake()
        else:
            self.fail(BusUnavailable(f"the replies of {self.subject} arrive faster than they are read"))

    def fail(self, error: BusError) -> None:
        """Has `next` raise `error` after the replies that have arrived."""
        self._error = self._error or error
        self._wake()

    async def next(self, timeout: float) -> Message:
        """Returns the next reply.

        Raises:
            NoResponders: nobody subscribes to the subject of the request.
            RequestTimeout: no reply arrived within `timeout` seconds.
            BusError: the error that `fail` was given.
        """
        if not self._arrived and self._error is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            self._timer = loop.call_later(timeout, self._look_again, timeout)
            try:
                await self._waiter
            finally:
                self._timer.cancel()
                self._waiter = None
        if not self._arrived:
            assert self._error is not None
            raise self._error
        message = self._arrived.popleft()
        if message.headers.get(STATUS) == NO_RESPONDERS:
            raise NoResponders(f"nobody subscribes to {self.subject}")
        return message

    def _look_again(self, timeout: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(LAST_LOOK, self._time_out, timeout)

    def _time_out(self, timeout: float) -> None:
        self.fail(RequestTimeout(f"no reply from {self.subject} within {timeout:g} s"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Inbox:
    """A reply subject that is open inside its `with` block: what `Bus.inbox` returns."""

    __slots__ = ("_handler", "_requests", "_token")

    def __init__(self, requests: "Requests", handler: Handler) -> None:
        self._requests = requests
        self._handler = handler
        self._token = ""

    def __enter__(self) -> str:
        self._requests.check_connected()
        self._token = str(next(self._requests.tokens))
        self._requests.handlers[self._token] = self._handler
        return self._requests.prefix + self._token

    def __exit__(self, *_: object) -> None:
        del self._requests.handlers[self._token]


class Requests:
    """The inboxes and open requests of one connection. The bus subscribes `receive` to `pattern`."""

    def __init__(self, bus: Bus, inbox: str) -> None:
        self.pattern = f"{inbox}.*"
        self.prefix = f"{inbox}."
        self.handlers: dict[str, Handler] = {}
        self.exchanges: set[Exchange] = set()
        self.tokens = itertools.count()
        self._bus = bus

    def receive(self, message: Message) -> None:
        """Passes a message to the handler of its inbox; drops it if the inbox is closed."""
        handler = self.handlers.get(message.subject[len(self.prefix) :])
        if handler is not None:
            handler(message)

    def fail(self, error: BusError, subject: str = "") -> None:
        """Fails the open requests to `subject` (in lower case, as servers report it), or all of them."""
        for exchange in self.exchanges:
            if not subject or exchange.subject.lower() == subject:
                exchange.fail(error)

    def check_connected(self) -> None:
        """Raises `ConnectionLost` when there is no connection."""
        if not self._bus.connected:
            raise ConnectionLost("there is no connection to the broker")


class InboxBus(Bus):
    """The inboxes and requests of a bus, which every bus has alike.

    Attributes:
        requests: the inboxes and open requests.
    """

    def __init__(self, inbox_prefix: str) -> None:
        self._prefix = inbox_prefix
        self.requests = Requests(self, self.new_inbox())

    @override
    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        with Exchange(self.requests, subject) as exchange, _Inbox(self.requests, exchange.put) as reply:
            self.publish(subject, data, reply=reply, headers=headers)
            return await exchange.next(timeout)

    @override
    async def request_many(
        self, subject: str, data: bytes, *, stall: float, headers: Headers | None = None
    ) -> AsyncIterator[Message]:
        with Exchange(self.requests, subject) as exchange, _Inbox(self.requests, exchange.put) as reply:
            self.publish(subject, data, reply=reply, headers=headers)
            while (message := await exchange.next(stall)).data:
                yield message

    @override
    def inbox(self, handler: Handler) -> AbstractContextManager[str]:
        return _Inbox(self.requests, handler)

    @override
    def new_inbox(self) -> str:
        return f"{self._prefix}.{secrets.token_hex(11)}"
