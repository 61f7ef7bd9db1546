"""Sends each subscriber the frames that are due to it, one subscriber after the other."""

import asyncio
from collections import deque
from collections.abc import Callable

from pagewire.services.detokenizer.frames.delta_batcher import DeltaBatcher
from pagewire.services.detokenizer.frames.last_frame import last_frame, prompt_before, spelled, spelled_prompt
from pagewire.services.detokenizer.state.stream import Stream, StreamState, Subscriber
from pagewire.services.detokenizer.text.vocabulary import Spell, Spelling
from pagewire.shared.bus import Bus
from pagewire.shared.client_protocol.frame_encoding import encode_frame, error_frame, error_headers
from pagewire.shared.errors import BusUnavailable, MessageTooLarge, PayloadTooLarge, RequestError
from pagewire.shared.messages.client import (
    Delta,
    Queued,
)

HIGH_WATER = 1 << 20
"""Bytes waiting for the socket above which no more frames are sent."""
RETRY_INTERVAL = 0.01
"""Seconds between two attempts to send while the connection lags."""
QUOTA = 64
"""Frames that a subscriber gets before the next one has its turn."""
TURNS = 128
"""Turns between two checks of how many bytes wait for the socket."""


class FrameSender:
    """Serves subscribers in turn, as fast as the connection takes frames and no faster.

    Attributes:
        frames: frames sent so far.
        spell: returns the spelling of a token, for log-probabilities.
        abort: ends a stream with an error, once no message can carry the frames of any of its subscribers.
    """

    def __init__(self, bus: Bus) -> None:
        self.frames = 0
        self.spell: Spell = lambda token: Spelling(str(token))
        self.abort: Callable[[Stream, RequestError], None] = lambda stream, error: None
        self._bus = bus
        self._publish = bus.publish
        self._batcher = DeltaBatcher(bus)
        self._waiting: deque[Subscriber] = deque()
        self._retry: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of subscribers to which frames are due."""
        return len(self._waiting)

    def enqueue(self, stream: Stream) -> None:
        """Queues the subscribers of a stream that has new frames for them; `drain` sends the frames."""
        for subscriber in stream.subscribers:
            if not subscriber.queued:
                subscriber.queued = True
                self._waiting.append(subscriber)

    def drain(self) -> None:
        """Sends frames until none are due or the connection lags; then sending goes on once the connection is back."""
        try:
            while self._waiting and self._bus.backlog() < HIGH_WATER:
                for _ in range(min(TURNS, len(self._waiting))):
                    self._serve(self._waiting[0])
                self._batcher.send()
        except BusUnavailable:  # treated like a connection that lags
            for subscriber in self._batcher.put_back():
                self.enqueue(subscriber.stream)
        if self._waiting and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_INTERVAL, self._try_again)

    def keep_alive(self, stream: Stream) -> None:
        """Tells the subscribers of a stream that the request still waits, unless the connection lags."""
        try:
            for subscriber in stream.subscribers:
                if subscriber.streaming and subscriber.accepted is None and self._bus.backlog() < HIGH_WATER:
                    frame = subscriber.encode(Queued(stream.public_id))
                    self._bus.publish(subscriber.reply, frame, reply=subscriber.probe)
                    subscriber.probe = ""
                    self.frames += 1
        except BusUnavailable:
            pass  # the next keep-alive says the same

    def close(self) -> None:
        """Stops sending."""
        self._waiting.clear()
        if self._retry is not None:
            self._retry.cancel()

    def _serve(self, subscriber: Subscriber) -> None:
        try:
            sent = self._send_due(subscriber)
        except MessageTooLarge:
            sent = self._refuse(subscriber)
        self.frames += sent
        self._waiting.popleft()
        if sent >= QUOTA:
            self._waiting.append(subscriber)
            return
        subscriber.queued = False
        if subscriber.closed:
            subscriber.stream.unsubscribe(subscriber)

    def _send_due(self, subscriber: Subscriber) -> int:
        """Sends about `QUOTA` of the frames that are due; returns how many, less than `QUOTA` if no more are due.

        Raises:
            MessageTooLarge: a frame does not fit into a message; the ones before it were sent.
            BusUnavailable: the connection takes no more; what was not sent stays due.
        """
        if subscriber.closed:
            return 0
        stream, batcher, publish = subscriber.stream, self._batcher, self._publish
        ended = stream.state is StreamState.ENDED
        if not subscriber.streaming:
            return self._send_last(subscriber) if ended else 0
        sent = 0
        if subscriber.accepted is not None and not stream.refused:
            publish(subscriber.reply, subscriber.encode(subscriber.accepted))
            subscriber.accepted = None
            sent = 1
        for index, completion in enumerate(stream.completions):
            position = subscriber.positions[index]
            end = len(completion.texts)
            if end - position > QUOTA - sent:  # min() would be a call for every token
                end = position + QUOTA - sent
            while position < end:
                delta = Delta(index, position, completion.texts[position], [completion.tokens[position]])
                if completion.logprobs is not None:
                    delta.logprobs = [spelled(completion.logprobs[position], self.spell)]
                if completion.origins is not None:
                    delta.origin = completion.origins.get(position, "sampled")
                if not position:
                    self._add_prompt(delta, stream)
                if subscriber.batch_inbox and not subscriber.probe:
                    batcher.add(subscriber, delta)
                else:
                    if subscriber.batch_inbox:
                        batcher.send()
                    publish(subscriber.reply, subscriber.encode(delta), reply=subscriber.probe)
                    subscriber.probe = ""
                position += 1
                sent += 1
                subscriber.positions[index] = position
        if not ended or sent >= QUOTA:
            return sent
        if subscriber.batch_inbox:
            batcher.send()
        return sent + self._send_last(subscriber)

    def _add_prompt(self, delta: Delta, stream: Stream) -> None:
        """Adds to the first token of a completion what there is to say of its prompt."""
        if prompt := prompt_before(stream, delta.index):
            delta.prompt_logprobs = spelled_prompt(prompt, self.spell)
        if stream.cached_tokens:
            delta.cached_tokens = stream.cached_tokens

    def _send_last(self, subscriber: Subscriber) -> int:
        """Sends the last frame, or the only reply to a request without a stream; returns the number of frames."""
        stream, reply, encoding = subscriber.stream, subscriber.reply, subscriber.encoding
        data, headers = last_frame(stream, encoding, self.spell, streaming=subscriber.streaming)
        self._bus.publish(reply, data, headers=headers)
        if subscriber.streaming:
            self._bus.publish(reply, b"")
        subscriber.closed = True
        return 1

    def _refuse(self, subscriber: Subscriber) -> int:
        """Sends an error instead of a frame that is too large; returns the number of frames. A stream that nobody else
        reads ends with the error."""
        stream, reply = subscriber.stream, subscriber.reply
        fewer = "log-probabilities" if subscriber.streaming else "tokens, or for a stream"
        error = PayloadTooLarge(f"the result does not fit into one message: ask for fewer {fewer}")
        frame = error_frame(error, stream.public_id, stream.tokens)
        self._bus.publish(reply, encode_frame(frame, subscriber.encoding), headers=error_headers(error))
        if subscriber.streaming:
            self._bus.publish(reply, b"")
        stream.unsubscribe(subscriber)
        if not stream.subscribers:
            self.abort(stream, error)
        return 1

    def _try_again(self) -> None:
        self._retry = None
        self.drain()
