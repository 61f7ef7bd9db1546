"""Collects deltas of several streams into one message."""

from pagewire.services.detokenizer.state.stream import Subscriber
from pagewire.shared.bus import Bus
from pagewire.shared.messages.client import (
    Delta,
    DeltaBatch,
    TokenLogprobs,
)

BATCH_BYTES = 1 << 15
"""Maximum size of a message with several deltas."""
_FRAME_BYTES = 128
"""Maximum size of a delta without its text and its subscriber's inbox."""
_LOGPROB_BYTES = 256
"""Maximum size of one log-probability without the text and the bytes of its token."""
_CHARACTER_BYTES = 6
"""Maximum size of a character of a text: JSON escapes some."""
_BYTE_BYTES = 4
"""Maximum size of a byte of a token, which JSON writes as a number."""


class DeltaBatcher:
    """Collects deltas of several streams that go to one connection, and sends them as one message.

    The caller sends collected deltas before any other frame of their subscribers.
    """

    def __init__(self, bus: Bus) -> None:
        self._publish = bus.publish
        self._limit = min(BATCH_BYTES, bus.max_payload // 2)
        self._size = 0
        self._waiting: dict[tuple[str, int], tuple[list[Subscriber], list[Delta]]] = {}
        """Subscribers and their deltas, in the same order, by inbox and encoding."""

    def add(self, subscriber: Subscriber, delta: Delta) -> None:
        """Collects the next delta of a subscriber. One that exceeds the size of a batch is sent at once.

        Raises:
            MessageTooLarge: the delta does not fit into any message.
            BusUnavailable: the connection takes no more; the delta was neither collected nor sent.
        """
        size = _FRAME_BYTES + len(subscriber.reply) + _CHARACTER_BYTES * len(delta.text)
        if delta.logprobs is not None:
            size += sum(map(_size, delta.logprobs))
        if delta.prompt_logprobs:
            size += sum(_size(token) for token in delta.prompt_logprobs if token)
        if self._size + size > self._limit:
            self.send()
        if size > self._limit:
            self._publish(subscriber.reply, subscriber.encode(delta))
            return
        waiting = self._waiting.get(subscriber.batch)
        if waiting is None:
            waiting = self._waiting[subscriber.batch] = [], []
        waiting[0].append(subscriber)
        waiting[1].append(delta)
        self._size += size

    def send(self) -> None:
        """Sends the collected deltas. A single one is sent to its own subscriber, without a batch.

        Raises:
            BusUnavailable: the connection takes no more; deltas that were not sent stay collected.
        """
        for batch, (subscribers, deltas) in list(self._waiting.items()):
            first = subscribers[0]
            if len(deltas) == 1:
                self._publish(first.reply, first.encode(deltas[0]))
            else:
                frame = DeltaBatch([subscriber.reply for subscriber in subscribers], deltas)
                self._publish(first.batch_inbox, first.encode(frame))
            del self._waiting[batch]
        self._size = 0

    def put_back(self) -> list[Subscriber]:
        """Makes the collected deltas due again, and returns their subscribers."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        self._size = 0
        for subscribers, deltas in waiting:
            for subscriber, delta in zip(subscribers, deltas, strict=True):
                subscriber.put_back(delta)
        return [subscriber for subscribers, _ in waiting for subscriber in subscribers]


def _size(logprobs: TokenLogprobs) -> int:
    """Returns the maximum size of the log-probabilities at one position."""
    return sum(
        _LOGPROB_BYTES
        + _CHARACTER_BYTES * len(logprob.decoded_token or "")
        + _BYTE_BYTES * (len(logprob.bytes) if logprob.bytes else 0)
        for logprob in logprobs.values()
    )
