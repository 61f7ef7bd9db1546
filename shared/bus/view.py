"""A view of a bus with inboxes under another prefix, for a connection that acts for several users."""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

from typing_extensions import override

from pagewire.shared.bus.protocol import Bus, Handler, Headers, Message, Store, Subscription
from pagewire.shared.bus.requests import Requests


class BusView(Bus):
    """A bus over the connection of another one, which closes it. Only the inboxes are its own. `Bus.view` creates it.

    Attributes:
        requests: its inboxes and open requests.
    """

    def __init__(self, bus: Bus, inbox_prefix: str) -> None:
        self._bus = bus
        self._prefix = inbox_prefix
        self.requests = Requests(bus, self.new_inbox())

    @property
    @override
    def max_payload(self) -> int:
        return self._bus.max_payload

    @property
    @override
    def store(self) -> Store:
        return self._bus.store

    @property
    @override
    def connected(self) -> bool:
        return self._bus.connected

    @property
    @override
    def reconnections(self) -> int:
        return self._bus.reconnections

    @override
    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        self._bus.publish(subject, data, reply=reply, headers=headers)

    @override
    def backlog(self) -> int:
        return self._bus.backlog()

    @override
    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        return await self.requests.request(subject, data, timeout=timeout, headers=headers)

    @override
    def request_many(
        self, subject: str, data: bytes, *, stall: float, headers: Headers | None = None
    ) -> AsyncIterator[Message]:
        return self.requests.request_many(subject, data, stall=stall, headers=headers)

    @override
    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        return await self._bus.subscribe(subject, handler, queue=queue)

    @override
    def inbox(self, handler: Handler) -> AbstractContextManager[str]:
        return self.requests.inbox(handler)

    @override
    def new_inbox(self) -> str:
        return f"{self._prefix}.{secrets.token_hex(11)}"

    @override
    async def view(self, inbox_prefix: str) -> Bus:
        return await self._bus.view(inbox_prefix)

    @override
    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._bus.on_reconnect(callback)

    @override
    async def wait_connected(self) -> None:
        await self._bus.wait_connected()

    @override
    async def flush(self, *, timeout: float = 2.0) -> None:
        await self._bus.flush(timeout=timeout)

    @override
    async def close(self) -> None:
        """The connection stays open, for the other views."""
