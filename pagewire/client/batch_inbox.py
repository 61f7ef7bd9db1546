"""Where deltas of several streams arrive as one message, and which stream each of them is for."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import Internal
from pagewire.shared.messages.client import Delta, DeltaBatch

_decoder = msgspec.msgpack.Decoder(DeltaBatch)


class BatchInbox:
    """That of one connection. It is there while a stream reads."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._readers: dict[str, Callable[[Delta], None]] = {}
        """By reply subject."""
        self._inbox = ExitStack()
        self._subject = ""

    @contextmanager
    def reading(self, reply: str, take: Callable[[Delta], None]) -> Iterator[str]:
        """Inside the block deltas for `reply` go to `take`; the subject of the inbox.

        Raises:
            ConnectionLost: there is no connection at its beginning.
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
            raise Internal("a batch could not be read: client and services are of different releases") from error
        readers = self._readers
        for reply, delta in zip(batch.replies, batch.deltas, strict=True):
            take = readers.get(reply)
            if take is not None:
                take(delta)
