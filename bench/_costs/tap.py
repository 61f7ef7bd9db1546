"""A connection to the in-memory bus with the measurement in place of a socket."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from typing_extensions import override

from pagewire.bench._costs.progress import Progress
from pagewire.shared.bus import Handler, Headers, Message
from pagewire.shared.bus.framing import deliver
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus, MemorySubscription

Wrap = Callable[[Handler], Handler]
"""Wraps the handler that is fed: unchanged, or with additional costs that the measurement has to see."""


def unchanged(handler: Handler) -> Handler:
    """Returns the handler itself."""
    return handler


class Tap(MemoryBus):
    """The bus of a service that is measured.

    What the service publishes under the subject `out` is kept, as in the buffer of a socket, and not delivered.
    Messages of `feed` reach their handler at once. So the cost of the in-memory bus itself does not count per token.

    Attributes:
        sent: data of the messages that were published under `out`; the rig empties it.
        progress: notified of each of them.
    """

    def __init__(self, broker: MemoryBroker, *, out: str, wrap: Wrap = unchanged, inbox_prefix: str = "_SVC") -> None:
        super().__init__(broker, inbox_prefix=inbox_prefix)
        self.sent: list[bytes] = []
        self.progress = Progress()
        self._out = out
        self._wrap = wrap
        self._handlers: dict[str, Handler] = {}

    @override
    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        if subject.startswith(self._out):
            self.sent.append(data)
            self.progress.notify()
        else:
            super().publish(subject, data, reply=reply, headers=headers)

    @override
    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> MemorySubscription:
        self._handlers[subject] = self._wrap(handler)
        return await super().subscribe(subject, handler, queue=queue)

    @override
    @contextmanager
    def inbox(self, handler: Handler) -> Iterator[str]:
        with super().inbox(handler) as subject:
            self._handlers[subject] = self._wrap(handler)
            yield subject

    def feed(self, pattern: str, message: Message) -> None:
        """Delivers a message to the subscription of `pattern`, or to an inbox."""
        deliver(self._handlers[pattern], message)
