"""A view of a bus with inboxes under another prefix, for a connection that acts for several users."""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

from pagewire.shared.bus.protocol import Bus, Handler, Headers, Message, Store, Subscription
from pagewire.shared.bus.requests import Requests


class BusView:
    """A bus over the connection of another one, which closes it. Only the inboxes are its own. `Bus.view` creates it.

    Attributes:
        requests: its inboxes and open requests.
    """

    def __init__(self, bus: Bus, inbox_prefix: str) -> None:
        self._bus = bus
        self._prefix = inbox_prefix
        self.requests = Requests(bus, self.new_inbox())

    @property
    def max_payload(self) -> int:
        """See `Bus`."""
        return self._bus.max_payload

    @property
    def store(self) -> Store:
        """See `Bus`."""
        return self._bus.store

    @property
    def connected(self) -> bool:
        """See `Bus`."""
        return self._bus.connected

    @property
    def reconnections(self) -> int:
        """See `Bus`."""
        return self._bus.reconnections

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """See `Bus`."""
        self._bus.publish(subject, data, reply=reply, headers=headers)

    def backlog(self) -> int:
        """See `Bus`."""
        return self._bus.backlog()

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        """See `Bus`."""
        return await self.requests.request(subject, data, timeout=timeout, headers=headers)

    def request_many(
        self, subject: str, data: bytes, *, stall: float, headers: Headers | None = None
    ) -> AsyncIterator[Message]:
        """See `Bus`."""
        return self.requests.request_many(subject, data, stall=stall, headers=headers)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """See `Bus`."""
        return await self._bus.subscribe(subject, handler, queue=queue)

    def inbox(self, handler: Handler) -> AbstractContextManager[str]:
        """See `Bus`."""
        return self.requests.inbox(handler)

    def new_inbox(self) -> str:
        """See `Bus`."""
        return f"{self._prefix}.{secrets.token_hex(11)}"

    async def view(self, inbox_prefix: str) -> Bus:
        """See `Bus`."""
        return await self._bus.view(inbox_prefix)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """See `Bus`."""
        self._bus.on_reconnect(callback)

    async def wait_connected(self) -> None:
        """See `Bus`."""
        await self._bus.wait_connected()

    async def flush(self, *, timeout: float = 2.0) -> None:
        """See `Bus`."""
        await self._bus.flush(timeout=timeout)

    async def close(self) -> None:
        """See `Bus`. The connection stays open, for the other views."""
