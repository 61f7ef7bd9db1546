"""The bus inside one process, with the semantics of NATS, for tests and for `pagewire bench cost`."""

import asyncio
import random
import re
from collections.abc import Callable

from typing_extensions import override

from pagewire.shared.bus.framing import NO_RESPONDERS, STATUS, check_pattern, check_subject, deliver, header_block
from pagewire.shared.bus.memory_store import MemoryStore
from pagewire.shared.bus.protocol import ACK_WAIT, DONE_AGE, Handler, Headers, Message, Subscription
from pagewire.shared.bus.requests import InboxBus
from pagewire.shared.bus.view import BusView
from pagewire.shared.errors import BusUnavailable, MessageTooLarge


def compiled(pattern: str) -> re.Pattern[str]:
    """Returns the expression of a pattern of subjects: `*` is one token, a trailing `>` is one or more tokens.

    >>> bool(compiled("a.*.>").fullmatch("a.b.c.d")), bool(compiled("a.*").fullmatch("a.b.c"))
    (True, False)
    """
    parts = ["[^.]+" if part == "*" else ".+" if part == ">" else re.escape(part) for part in pattern.split(".")]
    return re.compile(r"\.".join(parts))


class MemoryBroker:
    """Routes messages between the `MemoryBus` connections of one process, all on the same event loop."""

    def __init__(self, *, max_payload: int = 8 << 20, ack_wait: float = ACK_WAIT, done_age: float = DONE_AGE) -> None:
        self.max_payload = max_payload
        self.store = MemoryStore(max_payload=max_payload, ack_wait=ack_wait, done_age=done_age)
        self._exact: dict[str, list[MemorySubscription]] = {}
        self._wild: list[MemorySubscription] = []

    def add(self, subscription: "MemorySubscription") -> None:
        """Starts delivering to a subscription."""
        self._list_of(subscription).append(subscription)

    def remove(self, subscription: "MemorySubscription") -> None:
        """Stops delivering to a subscription."""
        self._list_of(subscription).remove(subscription)
        if not self._exact.get(subscription.subject, True):
            del self._exact[subscription.subject]

    def route(self, sender: "MemoryBus", message: Message) -> None:
        """Delivers to every plain subscription and to one of each queue group; without any, replies `NO_RESPONDERS`."""
        groups: dict[str, list[MemorySubscription]] = {}
        receivers = self._find(message.subject)
        for subscription in receivers:
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                subscription.put(message)
        for members in groups.values():
            random.choice(members).put(message)
        if message.reply and not receivers:
            status = Message(message.reply, b"", headers={STATUS: NO_RESPONDERS})
            for subscription in self._find(message.reply):
                if subscription.bus is sender:
                    subscription.put(status)

    def _find(self, subject: str) -> list["MemorySubscription"]:
        wild = [subscription for subscription in self._wild if subscription.pattern.fullmatch(subject)]
        return self._exact.get(subject, []) + wild

    def _list_of(self, subscription: "MemorySubscription") -> list["MemorySubscription"]:
        if "*" in subscription.subject or ">" in subscription.subject:
            return self._wild
        return self._exact.setdefault(subscription.subject, [])


class MemorySubscription(Subscription):
    """A subscription of a `MemoryBus`."""

    def __init__(self, bus: "MemoryBus", subject: str, handler: Handler, queue: str) -> None:
        self.bus = bus
        self.subject = subject
        self.pattern = compiled(subject)
        self.queue = queue
        self._handler = handler

    def put(self, message: Message) -> None:
        """Schedules the handler's call, so that it never runs inside `publish`; the loop keeps the order."""
        asyncio.get_running_loop().call_soon(deliver, self._handler, message)

    @override
    async def unsubscribe(self) -> None:
        self.bus.forget(self)
        await asyncio.sleep(0)  # the deliveries that are scheduled now run first


class MemoryBus(InboxBus):
    """A connection to a `MemoryBroker`. It cannot be lost, so `on_reconnect` has no effect."""

    def __init__(self, broker: MemoryBroker, *, inbox_prefix: str = "_SVC") -> None:
        super().__init__(inbox_prefix)
        self._broker = broker
        self._closing = self._closed = False
        self._subscriptions: set[MemorySubscription] = set()
        self._views: list[BusView] = []
        self._inbox = MemorySubscription(self, self.requests.pattern, self.requests.receive, "")
        broker.add(self._inbox)

    @property
    @override
    def max_payload(self) -> int:
        return self._broker.max_payload

    @property
    @override
    def store(self) -> MemoryStore:
        return self._broker.store

    @property
    @override
    def connected(self) -> bool:
        return not self._closed

    @property
    @override
    def reconnections(self) -> int:
        return 0

    @override
    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        check_subject(subject)
        if reply:
            check_subject(reply)
        size = len(header_block(headers)) + len(data)
        if size > self.max_payload:
            raise MessageTooLarge(size, self.max_payload)
        self._check_open()
        self._broker.route(self, Message(subject, bytes(data), reply, dict(headers or {})))

    @override
    def backlog(self) -> int:
        """There is no outbound buffer."""
        return 0

    @override
    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> MemorySubscription:
        check_pattern(subject)
        self._check_open()
        subscription = MemorySubscription(self, subject, handler, queue)
        self._subscriptions.add(subscription)
        self._broker.add(subscription)
        return subscription

    @override
    async def view(self, inbox_prefix: str) -> BusView:
        view = BusView(self, inbox_prefix)
        self._views.append(view)
        await self.subscribe(view.requests.pattern, view.requests.receive)
        return view

    @override
    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """The connection is never lost, so that `callback` is never called."""

    @override
    async def wait_connected(self) -> None:
        self._check_open()

    @override
    async def flush(self, *, timeout: float = 2.0) -> None:
        self._check_open()
        await asyncio.sleep(0)  # the deliveries that are scheduled now run first

    @override
    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        for subscription in list(self._subscriptions):
            self.forget(subscription)
        await asyncio.sleep(0)  # the deliveries that are scheduled now run first
        self._closed = True
        self._broker.remove(self._inbox)
        for requests in (self.requests, *(view.requests for view in self._views)):
            requests.fail(BusUnavailable("the bus is closed"))

    def forget(self, subscription: MemorySubscription) -> None:
        """Ends a subscription unless it has ended already."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._broker.remove(subscription)

    def _check_open(self) -> None:
        if self._closed:
            raise BusUnavailable("the bus is closed")
