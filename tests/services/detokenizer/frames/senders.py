"""A connection that can lag or break, streams that grow, and subscribers, for the tests of the frame sender."""

import msgspec

from pagewire.services.detokenizer.state.completion import Completion
from pagewire.services.detokenizer.state.stream import Stream, StreamState, Subscriber
from pagewire.shared.bus import Headers
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import BusUnavailable, MessageTooLarge
from pagewire.shared.messages.client import Accepted, Delta, DeltaBatch, Frame
from pagewire.shared.messages.open import Encoding

ACCEPTED = Accepted("r1", "cancel", "resume", 1)
_frame = msgspec.json.Decoder(Frame)
_batch = msgspec.json.Decoder(DeltaBatch)


class SlowBus(MemoryBus):
    """A connection whose socket takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__(MemoryBroker())
        self.waiting = 0
        self.limit = 8 << 20
        self.broken = False
        self.sent: list[tuple[str, bytes]] = []
        self.probes: list[str] = []

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        if self.broken:
            raise BusUnavailable("cut")
        if len(data) > self.limit:
            raise MessageTooLarge(len(data), self.limit)
        del headers
        self.sent.append((subject, data))
        if reply:
            self.probes.append(subject)

    def backlog(self) -> int:
        return self.waiting

    def frames(self, reader: str) -> list[Frame | None]:
        """Frames that a reader got; None for the empty message."""
        return [_frame.decode(data) if data else None for subject, data in self.sent if subject == reader]

    def starts(self, reader: str) -> list[int]:
        return [frame.start for frame in self.frames(reader) if isinstance(frame, Delta)]


def batch_of(data: bytes) -> list[tuple[str, int]]:
    """Reply subject and position of each delta in a batch."""
    batch = _batch.decode(data)
    return [(reply, delta.start) for reply, delta in zip(batch.replies, batch.deltas, strict=True)]


def stream_of(tokens: int, choices: int = 1) -> Stream:
    completions = [Completion(list(range(tokens)), [f"t{i}" for i in range(tokens)]) for _ in range(choices)]
    return Stream("r1", b"", completions, prompt_tokens=1)


def subscribe(
    stream: Stream,
    reply: str,
    *,
    streaming: bool = True,
    start: int = 0,
    batch_inbox: str = "",
    encoding: Encoding = Encoding.JSON,
) -> Subscriber:
    accepted = ACCEPTED if streaming else None
    subscriber = Subscriber(
        stream, reply, encoding, streaming=streaming, start=start, accepted=accepted, batch_inbox=batch_inbox
    )
    stream.subscribers.append(subscriber)
    return subscriber


def grow(stream: Stream, tokens: int) -> None:
    for completion in stream.completions:
        for _ in range(tokens):
            completion.texts.append(f"t{len(completion.tokens)}")
            completion.tokens.append(len(completion.tokens))


def end(stream: Stream) -> None:
    for completion in stream.completions:
        completion.finish = "length"
    stream.state = StreamState.ENDED
