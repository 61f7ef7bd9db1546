"""Sends each subscriber the frames that are due to it, and notices subscribers that have disconnected."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pagewire.services.detokenizer.stream import Stream, StreamState, Subscriber
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.bus.framing import NO_RESPONDERS, STATUS
from pagewire.shared.client_protocol.frame_encoding import encode_frame, error_frame, error_headers
from pagewire.shared.errors import BusUnavailable, MessageTooLarge, PayloadTooLarge
from pagewire.shared.messages import client, unpack
from pagewire.shared.messages.client import (
    Choice,
    Delta,
    DeltaBatch,
    Final,
    FinalChoice,
    Logprob,
    Queued,
    Result,
    Usage,
)
from pagewire.shared.messages.done import TokenLogprobs

HIGH_WATER = 1 << 20
"""Bytes waiting for the socket above which no more frames are sent."""
RETRY_INTERVAL = 0.01
"""Seconds between two attempts to send while the connection lags."""
QUOTA = 64
"""Frames that a subscriber gets before the next one has its turn."""
TURNS = 128
"""Turns between two checks of how many bytes wait for the socket."""
BATCH_BYTES = 1 << 15
"""Of several deltas in one message, at most."""
MAX_UNDELIVERED = 13
"""Probes in a row without a listener after which a subscriber counts as disconnected. With a probe every 0.8 s that is
10 s, since a client that reconnects has no listener meanwhile."""

_FRAME_BYTES = 128
"""Of a delta without its text and its subscriber's inbox, at most."""
_LOGPROB_BYTES = 256
"""Of one log-probability, about: only a token of many characters takes more."""
_CHARACTER_BYTES = 6
"""Of a character of a text, at most: JSON escapes some."""


class DeltaBatcher:
    """Collects deltas of several streams that go to one connection, and sends them there as one message.

    Collected deltas have to be sent before any other frame of their subscribers.
    """

    def __init__(self, bus: Bus) -> None:
        self._publish = bus.publish
        self._limit = min(BATCH_BYTES, bus.max_payload // 2)
        self._size = 0
        self._waiting: dict[tuple[str, int], tuple[list[Subscriber], list[Delta]]] = {}
        """The subscriber of each delta, and the deltas, by inbox and encoding."""

    def add(self, subscriber: Subscriber, delta: Delta) -> None:
        """Collects the next delta of a subscriber.

        Raises:
            BusUnavailable: see `send`; the delta was not collected.
        """
        size = _FRAME_BYTES + len(subscriber.reply) + _CHARACTER_BYTES * len(delta.text)
        if delta.logprobs is not None:
            size += _LOGPROB_BYTES * sum(map(len, delta.logprobs))
        if delta.prompt_logprobs:
            size += _LOGPROB_BYTES * sum(len(token) for token in delta.prompt_logprobs if token)
        if self._size + size > self._limit:
            self.send()
        waiting = self._waiting.get(subscriber.batch)
        if waiting is None:
            waiting = self._waiting[subscriber.batch] = [], []
        waiting[0].append(subscriber)
        waiting[1].append(delta)
        self._size += size

    def send(self) -> None:
        """Sends what was collected. A single delta is sent to its own subscriber, without a batch.

        Raises:
            BusUnavailable: the connection takes no more; what was not sent stays collected.
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
        """Makes what was collected due again, and returns the subscribers that it is due to."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        self._size = 0
        for subscribers, deltas in waiting:
            for subscriber, delta in zip(subscribers, deltas, strict=True):
                subscriber.put_back(delta)
        return [subscriber for subscribers, _ in waiting for subscriber in subscribers]


class FrameSender:
    """Serves subscribers in turn, as fast as the connection takes frames and no faster.

    Attributes:
        frames: frames sent so far.
        spell: returns the text of a token alone, for log-probabilities.
    """

    def __init__(self, bus: Bus) -> None:
        self.frames = 0
        self.spell: Callable[[int], str] = str
        self._bus = bus
        self._publish = bus.publish
        self._batcher = DeltaBatcher(bus)
        self._waiting: deque[Subscriber] = deque()
        self._retry: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Subscribers that have not been sent all that is due to them."""
        return len(self._waiting)

    def enqueue(self, stream: Stream) -> None:
        """Queues the subscribers of a stream that has something new for them; `drain` sends it."""
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
        """Tells the subscribers of a stream that the request still waits, except over a connection that lags."""
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
        sent = self._send_due(subscriber)
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
            BusUnavailable: the connection takes no more; what was not sent stays due.
        """
        if subscriber.closed:
            return 0
        stream, batcher, publish = subscriber.stream, self._batcher, self._publish
        ended = stream.state is StreamState.ENDED
        if not subscriber.streaming:
            return self._send_last(subscriber) if ended else 0
        sent = 0
        if subscriber.accepted is not None:
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
                if not position and (prompt := _prompt_before(stream, index)):
                    delta.prompt_logprobs = _spelled_prompt(prompt, self.spell)
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

    def _send_last(self, subscriber: Subscriber) -> int:
        """Sends the last frame, or the only reply to a request without a stream; returns the number of frames."""
        stream, reply, encoding = subscriber.stream, subscriber.reply, subscriber.encoding
        try:
            data, headers = _last_frame(stream, encoding, self.spell, streaming=subscriber.streaming)
            self._bus.publish(reply, data, headers=headers)
        except MessageTooLarge:
            error = PayloadTooLarge("the result does not fit into one message: ask for fewer tokens, or for a stream")
            frame = error_frame(error, stream.public_id, stream.tokens)
            self._bus.publish(reply, encode_frame(frame, encoding), headers=error_headers(error))
        if subscriber.streaming:
            self._bus.publish(reply, b"")
        subscriber.closed = True
        return 1

    def _try_again(self) -> None:
        self._retry = None
        self.drain()


class DisconnectMonitor:
    """Notices subscribers whose client is gone, so that the device computes nothing more for them.

    At each check, the next frame of every subscriber gets a reply subject: if the inbox has no listener, the broker
    says so there. A subscriber without a stream is not probed, as its only frame is the result.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = bus.new_inbox()
        self._numbers = itertools.count()
        self._probed: dict[str, Subscriber] = {}

    async def listen(self) -> Subscription:
        """Subscribes to what the broker answers."""
        return await self._bus.subscribe(f"{self._inbox}.*", self._on_answer)

    def check(self, subscribers: Iterable[Subscriber]) -> list[Subscriber]:
        """Returns the subscribers that have disconnected, and probes the others with their next frame."""
        before, self._probed = self._probed, {}
        disconnected = []
        for subscriber in subscribers:
            if not subscriber.streaming:
                continue
            if subscriber.probe in before:
                self._probed[subscriber.probe] = subscriber  # no frame was due since the last check
                continue
            if subscriber.undelivered < subscriber.probes:
                subscriber.probes = subscriber.undelivered = 0  # the last frame had a listener
            elif subscriber.undelivered >= MAX_UNDELIVERED:
                disconnected.append(subscriber)
                continue
            subscriber.probes += 1
            subscriber.probe = f"{self._inbox}.{next(self._numbers)}"
            self._probed[subscriber.probe] = subscriber
        return disconnected

    def _on_answer(self, message: Message) -> None:
        subscriber = self._probed.get(message.subject)
        if subscriber is not None and message.headers.get(STATUS) == NO_RESPONDERS:
            subscriber.undelivered += 1


def spelled(found: TokenLogprobs, spell: Callable[[int], str]) -> client.TokenLogprobs:
    """Returns what a client is told of the log-probabilities of one token."""
    ids, values = memoryview(found.ids).cast("I"), memoryview(found.values).cast("f")
    told = {ids[0]: Logprob(values[0], found.rank, spell(ids[0]))}
    for rank, token in enumerate(ids[1:], 1):
        if token not in told:
            told[token] = Logprob(values[rank], rank, spell(token))
    return told


def _last_frame(
    stream: Stream, encoding: int, spell: Callable[[int], str], *, streaming: bool
) -> tuple[bytes, dict[str, str] | None]:
    """Returns the bytes and the headers of the last frame of a stream, or of the only reply without one."""
    if stream.error is not None:
        frame = error_frame(stream.error, stream.public_id, stream.tokens)
        return encode_frame(frame, encoding), error_headers(stream.error)
    returned, metrics = stream.returned, stream.times.metrics()
    tokens = sum(len(completion.tokens) for completion in returned)
    usage = Usage(stream.prompt_tokens, tokens, stream.cached_tokens)
    if streaming:
        ends = [FinalChoice(i, end.finish or "cancelled", end.stop_reason) for i, end in enumerate(returned)]
        return encode_frame(Final(stream.public_id, ends, usage, *_prompts(stream, spell), metrics), encoding), None
    choices = [
        Choice(
            index=index,
            text="".join(completion.texts),
            token_ids=completion.tokens,
            finish_reason=completion.finish or "cancelled",
            stop_reason=completion.stop_reason,
            logprobs=None
            if completion.logprobs is None or stream.hides_logprobs
            else [spelled(found, spell) for found in completion.logprobs],
            score=completion.score,
        )
        for index, completion in enumerate(returned)
    ]
    form = stream.chat_format
    result = Result(stream.public_id, choices, usage, *_prompts(stream, spell), metrics=metrics, chat_format=form)
    return encode_frame(result, encoding), None


def _prompts(
    stream: Stream, spell: Callable[[int], str]
) -> tuple[list[list[int]] | None, list[client.PromptLogprobs] | None]:
    """Returns ids and log-probabilities of the prompts, if the request asks for them."""
    if not stream.prompts:
        return None, None
    told = [_spelled_prompt(prompt, spell) for prompt in stream.prompt_logprobs]
    return [unpack(prompt) for prompt in stream.prompts], told or None


def _prompt_before(stream: Stream, index: int) -> Sequence[TokenLogprobs | None]:
    """Returns the log-probabilities of the prompt that come with a completion: the first one of the prompt."""
    if not stream.prompts:
        return ()
    prompt, completion = divmod(index, len(stream.completions) // len(stream.prompts))
    return () if completion or not stream.prompt_logprobs else stream.prompt_logprobs[prompt]


def _spelled_prompt(prompt: Sequence[TokenLogprobs | None], spell: Callable[[int], str]) -> client.PromptLogprobs:
    return [None if found is None else spelled(found, spell) for found in prompt]
