"""A view of a bus with inboxes under another prefix, for a connection that acts for several users."""

from collections.abc import Callable

from typing_extensions import override

from pagewire.shared.bus.protocol import Bus, Handler, Headers, Store, Subscription
from pagewire.shared.bus.requests import InboxBus


class BusView(InboxBus):
    """A bus over the connection of another one, which closes it, with inboxes of its own. `Bus.view` creates it."""

    def __init__(self, bus: Bus, inbox_prefix: str) -> None:
        super().__init__(inbox_prefix)
        self._bus = bus

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
    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        return await self._bus.subscribe(subject, handler, queue=queue)

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
