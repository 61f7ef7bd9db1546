"""What one reader of a stream has been sent, and the order in which readers are served."""

import asyncio
from collections import deque

from pagewire.services.detokenizer import frames
from pagewire.services.detokenizer.batches import Batches
from pagewire.services.detokenizer.stream import Stream, StreamState
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusUnavailable, MessageTooLarge
from pagewire.shared.frames import encoder
from pagewire.shared.messages.client import Accepted, Delta, Queued

HIGH_WATER = 1 << 20
"""Bytes waiting for the socket above which frames stay where they are."""
RETRY = 0.01
"""Seconds between two looks at a connection that lags."""
QUOTA = 64
"""Frames that a reader gets before the next one has its turn."""
AT_ONCE = 128
"""Turns between two looks at what waits for the socket."""


class Mailbox:
    """One reader, as a position in its stream: frames are made when they are sent, so a slow reader costs nothing.

    Attributes:
        encoding: the `Encoding` of its frames.
        encode: makes their bytes.
        batch_inbox: where its deltas may be sent with those of others; empty: nowhere.
        probe: reply subject of the next frame, which asks whether the reader is there; empty when that is not asked.
        asked: times that it was asked since it was last there.
        refused: times since then that the broker said that nobody listens.
    """

    __slots__ = (
        "_greeting",
        "_next",
        "asked",
        "batch_inbox",
        "closed",
        "encode",
        "encoding",
        "probe",
        "queued",
        "refused",
        "reply",
        "stream",
        "streaming",
    )

    def __init__(
        self,
        stream: Stream,
        reply: str,
        encoding: int,
        *,
        streaming: bool,
        start: int = 0,
        greeting: Accepted | None = None,
        batch_inbox: str = "",
    ) -> None:
        """`start`: position in each completion of the first token wanted."""
        self.stream = stream
        self.reply = reply
        self.streaming = streaming
        self.closed = False
        self.queued = False
        self.probe = ""
        self.asked = 0
        self.refused = 0
        self.encoding = encoding
        self.encode = encoder(encoding)
        self.batch_inbox = batch_inbox
        self._greeting = greeting
        self._next = [start] * len(stream.completions)

    def pump(self, bus: Bus, batches: Batches, quota: int) -> int:
        """Sends up to about `quota` frames that are due; how many it sent. Less than `quota`: nothing is left for now.

        Deltas that may come with others are left to `batches`, before which no later frame is sent.

        Raises:
            BusUnavailable: the connection takes no more; nothing is lost by that.
        """
        if self.closed:
            return 0
        ended = self.stream.state is StreamState.ENDED
        if not self.streaming:
            return self._close(bus) if ended else 0
        sent = 0
        if self._greeting is not None:
            bus.publish(self.reply, self.encode(self._greeting))
            self._greeting = None
            sent = 1
        for index, completion in enumerate(self.stream.completions):
            position = self._next[index]
            end = min(len(completion.texts), position + quota - sent)
            while position < end:
                delta = Delta(index, position, completion.texts[position], [completion.tokens[position]])
                if self.batch_inbox and not self.probe:
                    batches.add(self, delta)
                else:
                    self._catch_up(batches)
                    bus.publish(self.reply, self.encode(delta), reply=self.probe)
                    self.probe = ""
                position += 1
                sent += 1
                self._next[index] = position
        if not ended or sent >= quota:
            return sent
        self._catch_up(batches)
        return sent + self._close(bus)

    def rewind(self, start: int, greeting: Accepted | None = None) -> None:
        """The reader wants the frames from `start` on again; what it was not sent yet, it gets in any case."""
        self._greeting = greeting or self._greeting
        self._next = [min(position, start) for position in self._next]

    def take_back(self, delta: Delta) -> None:
        """A delta could not be sent: it is due again."""
        self._next[delta.index] = min(self._next[delta.index], delta.start)

    def keep_alive(self, bus: Bus) -> None:
        """Tells the reader that the request still waits."""
        if self.streaming and self._greeting is None:
            bus.publish(self.reply, self.encode(Queued(self.stream.request_id)), reply=self.probe)
            self.probe = ""

    def _catch_up(self, batches: Batches) -> None:
        """What was left to the batches goes before what is sent next."""
        if self.batch_inbox:
            batches.send()

    def _close(self, bus: Bus) -> int:
        """Sends the last frame; the number of frames."""
        data, headers = frames.closing(self.stream, self.encoding, streaming=self.streaming)
        try:
            bus.publish(self.reply, data, headers=headers)
        except MessageTooLarge:
            data, headers = frames.too_large(self.stream, self.encoding)
            bus.publish(self.reply, data, headers=headers)
        if self.streaming:
            bus.publish(self.reply, b"")
        self.closed = True
        return 1


class Outbox:
    """Serves mailboxes in turn, as fast as the connection takes frames and no faster.

    Attributes:
        frames: frames sent so far.
    """

    def __init__(self, bus: Bus) -> None:
        self.frames = 0
        self._bus = bus
        self._batches = Batches(bus)
        self._waiting: deque[Mailbox] = deque()
        self._retry: asyncio.TimerHandle | None = None

    def post(self, stream: Stream) -> None:
        """The stream has something new for its readers; `drain` sends it."""
        for mailbox in stream.mailboxes:
            self._post(mailbox)

    def drain(self) -> None:
        """Sends what waits, until the connection lags; then goes on by itself as soon as it has caught up."""
        try:
            while self._waiting and self._bus.backlog() < HIGH_WATER:
                for _ in range(min(AT_ONCE, len(self._waiting))):
                    self._serve(self._waiting[0])
                self._batches.send()
        except BusUnavailable:  # as with a lagging connection: what waits is sent when it is back
            for mailbox in self._batches.take_back():
                self._post(mailbox)
        if self._waiting and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY, self._try_again)

    def keep_alive(self, stream: Stream) -> None:
        """Tells the readers of a stream that it still waits, unless they lag anyway."""
        try:
            for mailbox in stream.mailboxes:
                if self._bus.backlog() < HIGH_WATER:
                    mailbox.keep_alive(self._bus)
                    self.frames += 1
        except BusUnavailable:
            pass  # the next one tells as much

    def close(self) -> None:
        """Sends nothing more."""
        self._waiting.clear()
        if self._retry is not None:
            self._retry.cancel()

    def _post(self, mailbox: Mailbox) -> None:
        if not mailbox.queued:
            mailbox.queued = True
            self._waiting.append(mailbox)

    def _serve(self, mailbox: Mailbox) -> None:
        sent = mailbox.pump(self._bus, self._batches, QUOTA)
        self.frames += sent
        self._waiting.popleft()
        if sent >= QUOTA:
            self._waiting.append(mailbox)
            return
        mailbox.queued = False
        if mailbox.closed:
            mailbox.stream.drop(mailbox)

    def _try_again(self) -> None:
        self._retry = None
        self.drain()
