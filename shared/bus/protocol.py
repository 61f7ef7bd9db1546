"""What the services need of a message bus. `shared.bus.nats` and `shared.bus.memory` are its two implementations."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

Headers = Mapping[str, str]

ACK_WAIT = 2.0
"""Seconds after which an item that was not renewed is delivered again."""
DONE_AGE = 120.0
"""Seconds for which the record of an ended request is kept."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message as a subscriber sees it. A struct, since a frozen dataclass takes most of a delivery to build."""

    subject: str
    data: bytes
    reply: str = ""
    """Where an answer goes; empty: none is wanted."""
    headers: Headers = {}


Handler = Callable[[Message], None]
"""Called once per message, in the order of the subscription, on the event loop. It must return at once: what takes
time is handed to a bounded set of tasks. An exception that it raises is logged; the next follows."""


class Subscription(Protocol):
    """Interest in a subject."""

    async def unsubscribe(self) -> None:
        """No message is delivered after this returns; those that arrived before it were delivered."""


@dataclass(frozen=True, slots=True)
class Item:
    """One delivery of a work item."""

    data: bytes
    headers: Headers
    ack: str
    """Subject that renews, ends or hands back this delivery."""
    deliveries: int
    """1 for the first delivery."""
    stored_at: float
    """Unix time in seconds at which the queue took it."""


class Store(Protocol):
    """What survives the death of every service: the work queues, the records of what ended, and the term counter.

    A queue is named by one or more tokens, `a.b.c`, and exists from the moment when somebody names it.
    """

    async def put_work(self, queue: str, data: bytes, *, headers: Headers | None = None) -> None:
        """Stores an item. On return it will be delivered until it is ended.

        Raises:
            MessageTooLarge, BusUnavailable, RequestTimeout
        """

    async def pull_work(self, queue: str, count: int, *, expires: float) -> list[Item]:
        """Up to `count` items; waits up to `expires` seconds for the first one. Empty when none came."""

    async def stocked(self, prefix: str) -> list[str]:
        """The queues whose names begin with the tokens `prefix` and that hold items, also such as are delivered."""

    async def renew_work(self, ack: str) -> None:
        """Postpones the redelivery of an item by another redelivery time."""

    async def end_work(self, ack: str) -> None:
        """Ends an item for good; returns once the queue has confirmed it."""

    async def return_work(self, ack: str) -> None:
        """Hands an item back: it is delivered again at once, to anyone."""

    async def put_done(self, request_id: str, data: bytes) -> None:
        """Records how a request ended, for two minutes."""

    async def get_done(self, request_id: str) -> bytes | None:
        """The record of a request that ended in the last two minutes."""

    async def next_term(self) -> int:
        """A number higher than any that this returned before, to anyone."""


class Bus(Protocol):
    """Publish, subscribe and request over subjects, and the store behind them."""

    @property
    def max_payload(self) -> int:
        """Bytes that header and payload of one message may have together."""

    @property
    def store(self) -> Store:
        """The durable part."""

    @property
    def connected(self) -> bool:
        """Whether messages reach the broker at this moment."""

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """Hands a message to the connection: at most once, in order per publisher. Never waits.

        Raises:
            MessageTooLarge: header and payload exceed `max_payload`.
            BusUnavailable: closed, or the outbound buffer is full.
        """

    def backlog(self) -> int:
        """Bytes handed over and not yet written to the socket."""

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        """Publishes with a private inbox and waits for one reply.

        Raises:
            NoResponders: nobody subscribes; known at once.
            RequestTimeout: no reply within `timeout` seconds.
            MessageTooLarge, BusUnavailable
        """

    def request_many(
        self, subject: str, data: bytes, *, stall: float, headers: Headers | None = None
    ) -> AsyncIterator[Message]:
        """Publishes with an inbox of its own and yields every reply until one with an empty body, which is not yielded.

        Raises:
            NoResponders
            RequestTimeout: no message for `stall` seconds.
            MessageTooLarge, BusUnavailable
        """

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Delivers messages whose subject matches (`*` one token, a last `>` the rest) to `handler`.

        With `queue`, each message goes to one subscriber of that group. On return the broker knows the interest: a
        message published afterwards by anyone is delivered.
        """

    def inbox(self, handler: Handler) -> AbstractContextManager[str]:
        """A reply subject of this connection: what comes there inside the block goes to `handler`, the rest nowhere.

        It costs no message to the broker, and comes back by itself after a reconnection.

        Raises:
            ConnectionLost: there is none at its beginning.
        """

    def new_inbox(self) -> str:
        """A subject that only this connection listens to once it subscribes."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Calls back after every reconnection: messages may have been lost."""

    async def flush(self, *, timeout: float = 2.0) -> None:
        """Returns when the broker has taken in everything that was published and subscribed before."""

    async def close(self) -> None:
        """Delivers what has arrived, writes what was published, and ends the connection. Harmless twice."""
