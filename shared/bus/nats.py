"""The bus over NATS. `shared.bus.nats_client` works around the defects of nats-py."""

import asyncio
import re
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import structlog
from typing_extensions import override

from pagewire.shared import subjects
from pagewire.shared.bus.framing import MAX_CONTROL_LINE, check_pattern, check_subject, header_block
from pagewire.shared.bus.nats_client import HandlerSubscription, NatsClient, urls_of
from pagewire.shared.bus.nats_store import Connection, NatsStore
from pagewire.shared.bus.protocol import Handler, Headers, Subscription
from pagewire.shared.bus.requests import LAST_LOOK, InboxBus
from pagewire.shared.bus.view import BusView
from pagewire.shared.errors import (
    BusError,
    BusUnavailable,
    ConfigurationError,
    ConnectionLost,
    MessageTooLarge,
    NotPermitted,
    RequestTimeout,
)
from pagewire.shared.settings.config import MAX_STORE

OUTBOUND_LIMIT = 32 << 20
"""Maximum bytes in the outbound buffer while the server reads too slowly or there is no connection."""
CLOSE_TIMEOUT = 2.0
"""Seconds for which `close` waits for a server that does not respond."""

_PERMISSION_ERROR = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')

log = structlog.get_logger()


async def connect(
    url: str,
    *,
    name: str,
    user: str = "",
    password: str = "",
    inbox_prefix: str = subjects.SERVICE_INBOX,
    connect_timeout: float = 5.0,
    max_store: int = MAX_STORE,
    create_streams: bool = False,
    replicas: int = 1,
    tls: ssl.SSLContext | None = None,
) -> "NatsBus":
    """Connects to a server.

    Args:
        url: nats://host:port or tls://host:port, several for a cluster, separated by commas. When a server is lost, the
            connection moves to another one.
        name: name of the connection, which the server shows.
        user, password: credentials; empty: none.
        inbox_prefix: prefix of the inboxes, which the user may read.
        connect_timeout: seconds that the servers have to answer.
        max_store: bytes that the streams of the store may take together, on each server.
        create_streams: whether to create the streams of the store, now and when the servers have lost them.
        replicas: servers that keep a copy of each stream.
        tls: how the server's certificate is checked, and which certificate the server gets; a server without TLS is
            then refused. None: the system's defaults if the server wants TLS.

    Raises:
        BusUnavailable: no server answered within `connect_timeout` seconds, or a service finds no JetStream that
            can keep the streams.
        ConfigurationError: `url` is malformed, or the server refuses the credentials, the inbox or the streams.
    """
    urls_of(url)
    bus = NatsBus(inbox_prefix, max_store, create_streams=create_streams, replicas=replicas)
    try:
        await bus.open(url, name, user, password, connect_timeout, tls)
        if create_streams:
            await bus.store.prepare()
    except RequestTimeout:
        await bus.close()
        raise BusUnavailable("JetStream does not answer: do enough of its servers run?") from None
    except (BusError, ConfigurationError, asyncio.CancelledError):
        await bus.close()
        raise
    return bus


class NatsSubscription(Subscription):
    """A subscription of a `NatsBus`."""

    def __init__(self, bus: "NatsBus", subscription: HandlerSubscription) -> None:
        self._bus = bus
        self._subscription = subscription

    @override
    async def unsubscribe(self) -> None:
        await self._bus.end_subscriptions([self._subscription])


class NatsBus(InboxBus, Connection):
    """A connection to a NATS server that reconnects whenever it is lost. `connect` creates it.

    Attributes:
        denials: how often the server has refused a publication or a subscription of this user.
    """

    def __init__(self, inbox_prefix: str, max_store: int, *, create_streams: bool = False, replicas: int = 1) -> None:
        super().__init__(inbox_prefix)
        self._client = NatsClient(self._on_denied, self._on_disconnect, self._on_reconnect)
        self._store = NatsStore(self, self.requests, max_store, create_streams=create_streams, replicas=replicas)
        self._views: list[BusView] = []
        self._subscriptions: set[HandlerSubscription] = set()
        self.denials = 0
        self._denied: set[str] = set()
        self._connected = asyncio.Event()
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._reconnections = 0
        self._closing = False

    async def open(
        self, url: str, name: str, user: str, password: str, connect_timeout: float, tls: ssl.SSLContext | None
    ) -> None:
        """Connects for the first time; see `connect`."""
        await self._client.open(url, name, user, password, connect_timeout, tls)
        self._connected.set()
        try:
            await self._subscribe(self.requests.pattern, self.requests.receive, "")
        except NotPermitted as error:
            raise ConfigurationError(f"{error}: give the user whose inboxes these are, and its password") from None

    @property
    @override
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    @property
    @override
    def store(self) -> NatsStore:
        return self._store

    @property
    def address(self) -> str:
        """Host and port of the server that it is connected to, or was connected to last."""
        return self._client.address

    @property
    @override
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    @property
    @override
    def reconnections(self) -> int:
        return self._reconnections

    @override
    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        check_subject(subject)
        if reply:
            check_subject(reply)
        client = self._client
        block = header_block(headers) if headers else b""
        size = len(block) + len(data)
        if size > client.max_payload:
            raise MessageTooLarge(size, self.max_payload)
        line = f"HPUB {subject} {reply} {len(block)} {size}\r\n" if block else f"PUB {subject} {reply} {size}\r\n"
        if len(line) > MAX_CONTROL_LINE:
            raise MessageTooLarge(len(line), MAX_CONTROL_LINE)
        if client.is_closed:
            raise BusUnavailable("the bus is closed")
        if client.pending_data_size + size > OUTBOUND_LIMIT:
            raise BusUnavailable("the broker reads too slowly: the outbound buffer is full")
        client.send(b"".join((line.encode(), block, data, b"\r\n")))

    @override
    def backlog(self) -> int:
        return self._client.backlog()

    @override
    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> NatsSubscription:
        """Subscribes on this connection and after every reconnection.

        Raises:
            NotPermitted: this user may not subscribe there.
            BusUnavailable, RequestTimeout: the broker did not confirm the subscription.
        """
        check_pattern(subject)
        if queue:
            check_subject(queue)
        subscription = await self._subscribe(subject, handler, queue)
        self._subscriptions.add(subscription)
        return NatsSubscription(self, subscription)

    @override
    async def view(self, inbox_prefix: str) -> BusView:
        view = BusView(self, inbox_prefix)
        await self._subscribe(view.requests.pattern, view.requests.receive, "")
        self._views.append(view)
        return view

    @override
    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._reconnect_callbacks.append(callback)

    @override
    async def wait_connected(self) -> None:
        await self._connected.wait()

    @override
    async def flush(self, *, timeout: float = 2.0) -> None:
        """Waits for the answer to a ping.

        Raises:
            ConnectionLost: there is no connection, or it was lost.
            RequestTimeout: the broker did not answer within `timeout` seconds.
        """
        await self._wait_for(self._client.ping(), timeout)

    async def end_subscriptions(self, subscriptions: Iterable[HandlerSubscription]) -> bool:
        """Unsubscribes after delivering what the broker had sent by then; returns whether the broker confirmed."""
        ending = self._subscriptions.intersection(subscriptions)
        self._subscriptions -= ending
        barriers = [self._client.end_subscription(subscription) for subscription in ending]
        try:
            await self._wait_for(barriers[-1] if barriers else self._client.ping(), CLOSE_TIMEOUT)
        except (ConnectionLost, RequestTimeout):  # the subscriptions have ended all the same
            return False
        return True

    @contextmanager
    @override
    def subscribed(self, subject: str, handler: Handler) -> Iterator[None]:
        """When the block ends, messages that the broker has sent by then are still delivered."""
        subscription = self._client.add_subscription(subject, "", handler)
        try:
            yield
        finally:
            self._client.end_subscription(subscription)

    @override
    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        answered = await self.end_subscriptions(self._subscriptions)
        self._fail_requests(BusUnavailable("the bus is closed"))
        await self._client.close_within(CLOSE_TIMEOUT if answered else 0.0)

    async def _subscribe(self, subject: str, handler: Handler, queue: str) -> HandlerSubscription:
        subscription = self._client.add_subscription(subject, queue, handler)
        try:
            await self.flush()
            if subject.lower() in self._denied:
                self._denied.remove(subject.lower())
                raise NotPermitted(f"this user may not subscribe to {subject}")
        except (BusError, asyncio.CancelledError):
            self._client.end_subscription(subscription)
            raise
        return subscription

    async def _wait_for(self, barrier: asyncio.Future[bool], timeout: float) -> None:
        """Waits for the answer to a ping; raises what `flush` raises."""
        if not (await asyncio.wait({barrier}, timeout=timeout))[0]:
            await asyncio.wait({barrier}, timeout=LAST_LOOK)
        if not barrier.done():
            barrier.cancel()
            raise RequestTimeout(f"the broker did not answer within {timeout:g} s")
        if barrier.cancelled():
            raise ConnectionLost("there is no connection to the broker")

    def _on_denied(self, text: str) -> None:
        """Fails the denied request or subscription. The server reports a denial before it answers the next barrier."""
        self.denials += 1
        log.error("permission_denied", server_message=text)
        denied = _PERMISSION_ERROR.search(text)
        if denied is None:
            return
        if denied[1] == "publish":
            self._fail_requests(NotPermitted(f"this user may not publish to {denied[2]}"), denied[2])
        else:
            self._denied.add(denied[2])

    def _fail_requests(self, error: BusError, subject: str = "") -> None:
        for requests in (self.requests, *(view.requests for view in self._views)):
            requests.fail(error, subject)

    def _on_disconnect(self, reason: str) -> None:
        if not self._connected.is_set():
            return
        self._connected.clear()
        self._fail_requests(ConnectionLost("the connection to the broker was lost"))
        if not self._closing:
            log.warning("nats_disconnected", server=self.address, reason=reason)

    def _on_reconnect(self) -> None:
        self._reconnections += 1
        self._connected.set()
        log.info("nats_reconnected", server=self.address)
        for callback in self._reconnect_callbacks:
            asyncio.get_running_loop().call_soon(callback)
