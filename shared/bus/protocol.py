"""The protocol of the message bus; `shared.bus.nats` and `shared.bus.memory` implement it."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

Headers = Mapping[str, str]

ACK_WAIT = 2.0
"""Seconds after which an item is delivered again unless it was renewed."""
DONE_AGE = 120.0
"""Seconds for which the record of an ended request is kept: repeated requests and redelivered items come earlier."""


LIST_BATCH = 100
"""Maximum number of items in an answer of `list_work`."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """A received message. It is a struct because building a frozen dataclass would take most of a delivery's time."""

    subject: str
    data: bytes
    reply: str = ""
    """Subject to send an answer to; empty: no answer is expected."""
    headers: Headers = {}


Handler = Callable[[Message], None]
"""Called on the event loop once per message, in the order of the subscription. A handler must return at once and leave
longer work to a bounded set of tasks. An exception in it is logged and does not affect the next message."""


class Subscription(Protocol):
    """A subscription to a subject."""

    async def unsubscribe(self) -> None:
        """Ends the subscription: earlier messages have been delivered on return, later ones never are."""


@dataclass(frozen=True, slots=True)
class Item:
    """One delivery of a work item."""

    data: bytes
    headers: Headers
    ack: str
    """Subject to publish to in order to renew, end or return this delivery."""
    number: int
    """Number of the item, as `put_work` returned it."""
    deliveries: int
    """1 for the first delivery."""
    stored_at: float
    """Unix time in seconds at which the item was stored."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A work item in its queue, whether it has been delivered or not."""

    sequence: int
    """Grows from item to item, in the order in which they were stored."""
    data: bytes
    headers: Headers


@dataclass(frozen=True, slots=True)
class QueueLengths:
    """The items in some queues at one moment, including those that are delivered and have not been ended."""

    items: Mapping[str, int]
    """By queue; empty queues are left out."""
    last: int
    """Number of the last item that is counted, in these queues or in others, as `put_work` returned it."""
    left: int = 0
    """Bytes of room that all queues together still have."""


class Store(Protocol):
    """Durable state, which survives every service: work queues, records of ended requests, and the term counter.

    A queue's name has one or more tokens, `a.b.c`. Queues need not be created.

    Attributes:
        election_time: seconds for which a queue may deliver nothing after the loss of a server of a cluster; 0 for one
            server.
    """

    election_time: float = 0.0

    async def put_work(self, queue: str, data: bytes, *, headers: Headers | None = None) -> int:
        """Stores an item once. After this returns, the item is delivered again and again until somebody ends it.

        Returns the item's number. Later items of all queues have higher numbers.

        Raises:
            StorageRefused: the store has no room, or is gone.
            MessageTooLarge, BusUnavailable, RequestTimeout: in bounded time; the item may have been stored.
        """

    def now(self) -> float:
        """Returns the broker's time, as Unix time in seconds: the clocks of two services may differ by minutes."""

    async def read_clock(self) -> float:
        """Reads the broker's clock for `now`, and returns by how many seconds it is ahead of ours.

        Raises:
            BusError: the broker does not answer.
        """

    async def check(self) -> None:
        """Returns if items and records can be stored now. Raises what `put_work` raises."""

    async def pull_work(self, queue: str, count: int, *, expires: float) -> list[Item]:
        """Returns up to `count` items, waiting up to `expires` seconds for the first; empty when none arrived."""

    async def queue_lengths(self, prefix: str) -> QueueLengths:
        """Returns the lengths of the queues below the tokens `prefix`.

        In a cluster an item that has just been ended may still count.
        """

    async def list_work(self, prefix: str, after: int = 0) -> list[StoredItem]:
        """Returns the next items of the queues below the tokens `prefix`, without delivering them.

        The items are those with a `sequence` above `after`, in order: as many as one answer takes, empty when there are
        no more. Items that are delivered now are among them.
        """

    async def missing_work(self, numbers: Collection[int]) -> set[int]:
        """Returns which of the items with these numbers, as `put_work` returned them, are in no queue any more.

        They have ended, or the store has lost them: somebody has purged it, or a block of its disk is damaged.
        """

    async def undelivered(self, queue: str) -> int:
        """Returns how many items of a queue nobody has. While a pull waits at the queue, there are none for long."""

    async def deliver_anew(self, queue: str) -> None:
        """Has a queue deliver all of its items from the first one on, also those that somebody has.

        A queue whose position is wrong or that somebody has paused delivers nothing until then.
        """

    async def mend(self) -> list[str]:
        """Restores what somebody has deleted or changed in the store; returns what that was.

        Raises:
            StorageRefused: it cannot be restored.
        """

    async def renew_work(self, ack: str) -> None:
        """Postpones the redelivery of an item by another redelivery time."""

    async def end_work(self, ack: str) -> None:
        """Removes an item for good; returns once the queue has confirmed that."""

    async def return_work(self, ack: str) -> None:
        """Returns an item to its queue, which delivers it again at once to any reader."""

    async def put_done(self, request_id: str, data: bytes) -> None:
        """Records how a request ended; the record is kept for `DONE_AGE` seconds. Raises what `put_work` raises."""

    async def get_done(self, request_id: str) -> bytes | None:
        """Returns the record of an ended request, None when there is none or it has expired."""

    async def next_term(self) -> int:
        """Returns a number higher than every number that any connection has received from this method."""


class Bus(Protocol):
    """A connection for publishing, subscribing and requesting, with the durable store of its broker."""

    @property
    def max_payload(self) -> int:
        """Maximum size in bytes of a message's headers and payload together."""

    @property
    def store(self) -> Store:
        """The durable store."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the broker now."""

    @property
    def reconnections(self) -> int:
        """How often the connection has been lost and made again; messages may have been lost each time."""

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """Sends a message without waiting. Delivery is at most once, in order per publisher.

        Raises:
            MessageTooLarge: headers and payload exceed `max_payload`.
            BusUnavailable: the bus is closed, or the outbound buffer is full.
        """

    def backlog(self) -> int:
        """Returns the bytes published and not yet written to the socket."""

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        """Publishes with a private inbox and returns the first reply.

        Raises:
            NoResponders: nobody subscribes to the subject; raised at once.
            RequestTimeout: no reply within `timeout` seconds.
            MessageTooLarge, BusUnavailable
        """

    def request_many(
        self, subject: str, data: bytes, *, stall: float, headers: Headers | None = None
    ) -> AsyncIterator[Message]:
        """Publishes with a private inbox and yields replies until one has an empty body, which is not yielded.

        Raises:
            NoResponders
            RequestTimeout: no message for `stall` seconds.
            MessageTooLarge, BusUnavailable
        """

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Delivers messages whose subject matches (`*` one token, a last `>` the rest) to `handler`.

        With `queue`, each message goes to one subscriber of that queue group. On return the broker has registered the
        subscription: every message that anyone publishes afterwards is delivered. In a cluster the other servers learn
        of it a moment later, but before anything that this connection publishes afterwards.
        """

    def inbox(self, handler: Handler) -> AbstractContextManager[str]:
        """Context manager of a reply subject: inside the block, messages to it go to `handler`.

        The inbox needs no message to the broker and stays valid across reconnections.

        Raises:
            ConnectionLost: there is no connection when the block is entered.
        """

    def new_inbox(self) -> str:
        """Returns a unique inbox subject. Nobody subscribes to it yet."""

    async def view(self, inbox_prefix: str) -> "Bus":
        """Returns a bus over the same connection whose inboxes have another prefix. Both end together.

        Raises:
            NotPermitted: this user may not read inboxes there.
        """

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Has `callback` called after every reconnection; messages may have been lost before it."""

    async def wait_connected(self) -> None:
        """Returns once there is a connection."""

    async def flush(self, *, timeout: float = 2.0) -> None:
        """Returns once the broker has processed everything that was published and subscribed before."""

    async def close(self) -> None:
        """Delivers received messages, writes published ones, and ends the connection. May be called twice."""
