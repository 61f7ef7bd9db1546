"""The inbox that receives deltas of several streams in one message and passes each delta to its stream."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import Internal
from pagewire.shared.messages.client import Delta, DeltaBatch

_decoder = msgspec.msgpack.Decoder(DeltaBatch)


class BatchInbox:
    """The batch inbox of one connection. It is open while at least one stream reads."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._readers: dict[str, Callable[[Delta], None]] = {}
        """Handlers of deltas, by the reply subject of their request."""
        self._inbox = ExitStack()
        self._subject = ""

    @contextmanager
    def reading(self, reply: str, take: Callable[[Delta], None]) -> Iterator[str]:
        """Passes deltas for `reply` to `take` inside the block; yields the subject of the inbox.

        Raises:
            ConnectionLost: there is no connection when the block is entered.
        """
        if not self._readers:
            self._subject = self._inbox.enter_context(self._bus.inbox(self._on_message))
        self._readers[reply] = take
        try:
            yield self._subject
        finally:
            del self._readers[reply]
            if not self._readers:
                self._inbox.close()

    def _on_message(self, message: Message) -> None:
        try:
            batch = _decoder.decode(message.data)
        except msgspec.DecodeError as error:
            raise Internal("a batch cannot be decoded: run client and services of the same release") from error
        readers = self._readers
        for reply, delta in zip(batch.replies, batch.deltas, strict=True):
            take = readers.get(reply)
            if take is not None:
                take(delta)
