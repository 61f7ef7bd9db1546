"""The bus over NATS. The traps of nats-py are known to `shared.bus.nats_client`."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import structlog

from pagewire.shared import subjects
from pagewire.shared.bus.framing import MAX_CONTROL_LINE, check_pattern, check_subject, header_block
from pagewire.shared.bus.nats_client import Interest, MendedClient, address_of
from pagewire.shared.bus.nats_store import NatsStore
from pagewire.shared.bus.protocol import Handler, Headers, Message
from pagewire.shared.bus.requests import Requests
from pagewire.shared.errors import (
    BusError,
    BusUnavailable,
    ConfigurationError,
    ConnectionLost,
    MessageTooLarge,
    NotPermitted,
    RequestTimeout,
)

OUTBOUND_LIMIT = 32 << 20
"""Bytes that may wait while the socket takes no more, or while there is none."""
CLOSE_TIMEOUT = 2.0
"""Seconds that `close` waits for a server that does not read."""

_REFUSAL = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')

log = structlog.get_logger()


async def connect(
    url: str,
    *,
    name: str,
    user: str = "",
    password: str = "",
    inbox_prefix: str = subjects.SERVICE_INBOX,
    connect_timeout: float = 5.0,
) -> "NatsBus":
    """Connects to the server at `url`. With the inboxes of services, the streams of the store are created, too.

    Raises:
        BusUnavailable: no server answered within `connect_timeout` seconds.
        ConfigurationError: `url` is none, or the server refuses the credentials or the inbox, or has no JetStream
            for a service.
    """
    address_of(url)
    bus = NatsBus(inbox_prefix)
    try:
        await bus.open(url, name, user, password, connect_timeout)
        if inbox_prefix == subjects.SERVICE_INBOX:
            await bus.store.prepare()
    except (BusError, ConfigurationError, asyncio.CancelledError):
        await bus.close()
        raise
    return bus


class NatsSubscription:
    """Interest of one connection in a subject."""

    def __init__(self, bus: "NatsBus", interest: Interest) -> None:
        self._bus = bus
        self._interest = interest

    async def unsubscribe(self) -> None:
        """See `Subscription`."""
        await self._bus.withdraw([self._interest])


class NatsBus:
    """One connection to a NATS server, made again for ever when it breaks. Obtained from `connect`."""

    def __init__(self, inbox_prefix: str) -> None:
        self._client = MendedClient(self._on_refusal, self._on_lost, self._on_restored)
        self._prefix = inbox_prefix
        self._requests = Requests(self, self.new_inbox())
        self._store = NatsStore(self, self._requests)
        self._interests: set[Interest] = set()
        self._denied: set[str] = set()
        self._up = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._closing = False

    async def open(self, url: str, name: str, user: str, password: str, connect_timeout: float) -> None:
        """Makes the first connection; see `connect`."""
        await self._client.open(url, name, user, password, connect_timeout)
        self._up.set()
        try:
            await self._listen(self._requests.pattern, self._requests.receive, "")
        except NotPermitted as error:
            raise ConfigurationError(f"{error}: this user may not have the inboxes of a service") from None

    @property
    def max_payload(self) -> int:
        """See `Bus`."""
        return int(self._client.max_payload)

    @property
    def store(self) -> NatsStore:
        """See `Bus`."""
        return self._store

    @property
    def connected(self) -> bool:
        """See `Bus`."""
        return bool(self._client.is_connected)

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """See `Bus`."""
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
            raise BusUnavailable("the broker does not keep up: the outbound buffer is full")
        client.push(b"".join((line.encode(), block, data, b"\r\n")))

    def backlog(self) -> int:
        """See `Bus`."""
        return self._client.backlog()

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        """See `Bus`. A lost connection ends it at once with `ConnectionLost`."""
        return await self._requests.request(subject, data, timeout=timeout, headers=headers)

    def request_many(
        self, subject: str, data: bytes, *, stall: float, headers: Headers | None = None
    ) -> AsyncIterator[Message]:
        """See `Bus`. A lost connection ends it at once with `ConnectionLost`."""
        return self._requests.request_many(subject, data, stall=stall, headers=headers)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> NatsSubscription:
        """See `Bus`.

        Raises:
            NotPermitted: this user may not subscribe there.
            BusUnavailable, RequestTimeout: the broker did not take it in.
        """
        check_pattern(subject)
        if queue:
            check_subject(queue)
        interest = await self._listen(subject, handler, queue)
        self._interests.add(interest)
        return NatsSubscription(self, interest)

    def inbox(self, handler: Handler) -> AbstractContextManager[str]:
        """See `Bus`."""
        return self._requests.inbox(handler)

    def new_inbox(self) -> str:
        """See `Bus`."""
        return f"{self._prefix}.{secrets.token_hex(11)}"

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """See `Bus`."""
        self._callbacks.append(callback)

    async def wait_connected(self) -> None:
        """Returns when there is a connection."""
        await self._up.wait()

    async def flush(self, *, timeout: float = 2.0) -> None:
        """See `Bus`.

        Raises:
            ConnectionLost: there is none, or it was lost.
            RequestTimeout: the broker did not answer within `timeout` seconds.
        """
        await self._pass(self._client.ping(), timeout)

    async def withdraw(self, interests: Iterable[Interest]) -> bool:
        """Ends subscriptions: what the broker sent before it knew is delivered first. False: it did not answer."""
        ending = self._interests.intersection(interests)
        self._interests -= ending
        barriers = [self._client.end_interest(interest) for interest in ending]
        try:
            await self._pass(barriers[-1] if barriers else self._client.ping(), CLOSE_TIMEOUT)
        except (ConnectionLost, RequestTimeout):  # which ends them, too
            return False
        return True

    @contextmanager
    def listening(self, subject: str, handler: Handler) -> Iterator[None]:
        """Delivers messages inside the block, and those that are on their way at its end."""
        interest = self._client.add_interest(subject, "", handler)
        try:
            yield
        finally:
            self._client.end_interest(interest)

    async def close(self) -> None:
        """See `Bus`."""
        if self._closing:
            return
        self._closing = True
        answered = await self.withdraw(self._interests)
        self._requests.fail(BusUnavailable("the bus is closed"))
        await self._client.shut(CLOSE_TIMEOUT if answered else 0.0)

    async def _listen(self, subject: str, handler: Handler, queue: str) -> Interest:
        interest = self._client.add_interest(subject, queue, handler)
        try:
            await self.flush()
            if subject.lower() in self._denied:
                self._denied.remove(subject.lower())
                raise NotPermitted(f"this user may not subscribe to {subject}")
        except (BusError, asyncio.CancelledError):
            self._client.end_interest(interest)
            raise
        return interest

    async def _pass(self, barrier: asyncio.Future[bool], timeout: float) -> None:
        """Waits for the answer to a ping; see `flush`."""
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wait({barrier})
        except TimeoutError:
            barrier.cancel()
            raise RequestTimeout(f"the broker did not answer within {timeout:g} s") from None
        if barrier.cancelled():
            raise ConnectionLost("there is no connection to the broker")

    def _on_refusal(self, text: str) -> None:
        """The server reports a missing permission, in the order of the commands and before the next barrier."""
        log.warning("not_permitted", server_says=text)
        refusal = _REFUSAL.search(text)
        if refusal is None:
            return
        if refusal[1] == "publish":
            self._requests.fail(NotPermitted(f"this user may not publish to {refusal[2]}"), refusal[2])
        else:
            self._denied.add(refusal[2])

    def _on_lost(self, reason: str) -> None:
        self._up.clear()
        self._requests.fail(ConnectionLost("the connection to the broker was lost"))
        if not self._closing:
            log.warning("nats_disconnected", reason=reason)

    def _on_restored(self) -> None:
        self._up.set()
        log.info("nats_reconnected")
        for callback in self._callbacks:
            asyncio.get_running_loop().call_soon(callback)
