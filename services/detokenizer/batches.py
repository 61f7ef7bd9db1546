"""Deltas that are due to several streams of one connection, which go there as one message."""

from typing import TYPE_CHECKING

from pagewire.shared.bus import Bus
from pagewire.shared.messages.client import Delta, DeltaBatch

if TYPE_CHECKING:
    from pagewire.services.detokenizer.mailbox import Mailbox

BATCH_BYTES = 1 << 15
"""Of several deltas in one message, at most."""
_FRAME_BYTES = 128
"""What a delta takes at most, beside its text and its reader's inbox."""
_CHARACTER_BYTES = 6
"""What a character of a text takes at most: JSON escapes some."""


class Batches:
    """Holds deltas back until `send`, which is due before anything else goes to their readers."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._limit = min(BATCH_BYTES, bus.max_payload // 2)
        self._size = 0
        self._waiting: dict[tuple[str, int], list[tuple[Mailbox, Delta]]] = {}
        """By inbox and encoding."""

    def add(self, mailbox: "Mailbox", delta: Delta) -> None:
        """Takes the next delta of a reader.

        Raises:
            BusUnavailable: see `send`; the delta was not taken.
        """
        size = _FRAME_BYTES + len(mailbox.reply) + _CHARACTER_BYTES * len(delta.text)
        if self._size + size > self._limit:
            self.send()
        self._waiting.setdefault((mailbox.batch_inbox, mailbox.encoding), []).append((mailbox, delta))
        self._size += size

    def send(self) -> None:
        """Sends what waits. One delta goes to its own reader, as if there were no batches.

        Raises:
            BusUnavailable: the connection takes no more; what was not sent still waits.
        """
        for key, parts in list(self._waiting.items()):
            if len(parts) == 1:
                ((mailbox, delta),) = parts
                self._bus.publish(mailbox.reply, mailbox.encode(delta))
            else:
                batch = DeltaBatch([mailbox.reply for mailbox, _ in parts], [delta for _, delta in parts])
                self._bus.publish(key[0], parts[0][0].encode(batch))
            del self._waiting[key]
        self._size = 0

    def take_back(self) -> list["Mailbox"]:
        """Gives what waits back to its readers, which are returned: it is due to them again."""
        parts = [part for parts in self._waiting.values() for part in parts]
        self._waiting.clear()
        self._size = 0
        for mailbox, delta in parts:
            mailbox.take_back(delta)
        return [mailbox for mailbox, _ in parts]
