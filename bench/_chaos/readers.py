"""The clients: over NATS the project's own, with a record of every frame, and over HTTP one that sends again."""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import msgspec
from httptools import HttpParserError, HttpResponseParser
from typing_extensions import override

from pagewire import AsyncClient
from pagewire.bench._chaos.checks import Refusal, Seen, SeenChoice, is_repetition
from pagewire.bench._chaos.requests import HTTP, Request
from pagewire.bench._common.event_stream import split_events
from pagewire.client.stream import Stream
from pagewire.embedded.address import Address
from pagewire.services.gateway.requests.completion_request import TIMEOUT_MS
from pagewire.shared.bus import Bus, Message, nats
from pagewire.shared.bus.framing import STATUS
from pagewire.shared.errors import (
    BusError,
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    PagewireError,
    Unavailable,
)
from pagewire.shared.messages.client import Accepted, Delta, DeltaBatch, ErrorFrame, Final, Frame, Queued, Result
from pagewire.shared.messages.client_headers import REFUSED

DEADLINE = 60.0
"""Seconds that a request has, unless queues are longer."""
PATIENCE = 10.0
"""Seconds behind the deadline after which a request without an end is hung."""
AGAIN_AFTER = 0.25
"""Seconds after which a request that was refused, or whose connection has broken, is sent again."""
SLOW = 3.0
"""Seconds that a slow reader takes for an answer, at most, if nothing else is slow."""
SLOW_READ = 256
"""Bytes that a slow reader reads at once over HTTP: about one token."""
_frames: msgspec.msgpack.Decoder[Frame | DeltaBatch] = msgspec.msgpack.Decoder(Frame | DeltaBatch)


class Reader(Protocol):
    """Sends requests one after the other and reads their answers."""

    async def read(self, request: Request, seen: Seen) -> None:
        """Sends a request, and writes down what comes."""

    async def close(self) -> None:
        """Ends its connection."""


async def open_reader(transport: str, address: Address, deadline: float = DEADLINE) -> Reader:
    """Returns a reader for requests over a transport, each of which has `deadline` seconds."""
    if transport == HTTP:
        return HttpReader(address.http, deadline)
    return await NatsReader.connect(address.nats, deadline)


class NatsReader(Reader):
    """Reads with `AsyncClient`, and looks at every frame that arrives below it."""

    def __init__(self, bus: Bus, deadline: float) -> None:
        self._bus = bus
        self._deadline = deadline
        self._record = _FrameRecord(Seen())
        self._client = AsyncClient(bus=cast("Bus", _RecordedBus(bus, self)))

    @classmethod
    async def connect(cls, url: str, deadline: float) -> "NatsReader":
        """Connects as a client without credentials."""
        return cls(await nats.connect(url, name="chaos-client", inbox_prefix="_INBOX"), deadline)

    @override
    async def close(self) -> None:
        await self._bus.close()

    def take(self, message: Message) -> None:
        """Takes a message before the client does."""
        self._record.take(message)

    def reply_to(self, inbox: str) -> None:
        """Notes an inbox of the request that is being sent."""
        self._record.inboxes.add(inbox)

    @override
    async def read(self, request: Request, seen: Seen) -> None:
        try:
            while True:
                async with asyncio.timeout(self._deadline + PATIENCE):  # each attempt has a deadline of its own
                    if await self._attempt(request, seen):
                        break
                await asyncio.sleep(AGAIN_AFTER)
        except TimeoutError:
            seen.hung = True
        seen.ended = time.monotonic()

    async def _attempt(self, request: Request, seen: Seen) -> bool:
        """Sends the request once; returns whether that was the last time."""
        record = self._record = _FrameRecord(seen)
        stream = self._client.stream(request.prompt, model=request.model, timeout=self._deadline, **request.sampling)
        try:
            if request.streamed:
                await self._follow(stream, request, seen)
            else:
                _take_result(await stream.result(), seen)
        except Cancelled as error:
            seen.complete = False
            if not seen.cancelled:
                seen.error = _text(error)
        except (Unavailable, Overloaded, BusError) as error:
            if time.monotonic() < seen.began + self._deadline and not any(seen.choices.values()):
                seen.refusals.append(Refusal(time.monotonic(), _text(error), record.accepted))
                seen.choices.clear()
                return False
            seen.error = _text(error)
        except DeadlineExceeded as error:
            seen.error = _text(error)
            seen.hung = not record.failed  # the client has given up, not the stack
        except PagewireError as error:
            seen.error = _text(error)
        seen.conflicts += record.conflicts
        return True

    async def _follow(self, stream: Stream, request: Request, seen: Seen) -> None:
        cancelling: asyncio.Task[None] | None = None
        tokens = 0
        try:
            async for delta in stream:
                choice = seen.choice(delta.index)
                choice.text += delta.text
                choice.token_ids += delta.token_ids
                tokens += len(delta.token_ids)
                if request.cancel_after and tokens >= request.cancel_after and cancelling is None:
                    seen.cancelled = True
                    cancelling = asyncio.create_task(_cancel(stream))
                if request.shape == "slow":
                    await asyncio.sleep(SLOW / request.sampling["max_tokens"])
        finally:
            if cancelling is not None:
                cancelling.cancel()
                await asyncio.wait({cancelling})
        assert stream.final is not None
        for end in stream.final.choices:
            choice = seen.choice(end.index)
            choice.finish_reason, choice.stop_reason = end.finish_reason, end.stop_reason


async def _cancel(stream: Stream) -> None:
    """Cancels a request, again and again until a service says that it has ended."""
    while True:
        try:
            if await stream.cancel() != "unknown":
                return
        except BusError:
            pass  # nobody answers now
        await asyncio.sleep(AGAIN_AFTER)


def _take_result(result: Result, seen: Seen) -> None:
    for choice in result.choices:
        seen.choices[choice.index] = SeenChoice(
            choice.text, list(choice.token_ids), choice.finish_reason, choice.stop_reason
        )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _RecordedBus:
    """A bus whose inboxes show their messages to a reader first."""

    def __init__(self, bus: Bus, reader: NatsReader) -> None:
        self._bus = bus
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def inbox(self, handler: Callable[[Message], None]) -> AbstractContextManager[str]:
        """Opens an inbox of the bus whose messages the reader takes first."""

        def take(message: Message) -> None:
            self._reader.take(message)
            handler(message)

        @contextmanager
        def inbox() -> Iterator[str]:
            with self._bus.inbox(take) as subject:
                self._reader.reply_to(subject)
                yield subject

        return inbox()


class _FrameRecord:
    """All frames of one request, as they have arrived."""

    def __init__(self, seen: Seen) -> None:
        self.inboxes: set[str] = set()
        self.accepted = self.failed = False
        self.conflicts: list[str] = []
        self._seen = seen
        self._deltas: dict[tuple[int, int], Delta] = {}
        self._ends: list[Final | Result | ErrorFrame] = []

    def take(self, message: Message) -> None:
        """Takes a message. One without content means nothing here: it closes a stream, or says that nobody listens."""
        if not message.data or STATUS in message.headers:
            return
        frame = _frames.decode(message.data)
        if isinstance(frame, DeltaBatch):
            for reply, delta in zip(frame.replies, frame.deltas, strict=True):
                if reply in self.inboxes:
                    self._take_delta(delta)
        elif message.subject not in self.inboxes:
            return  # of a request before
        elif isinstance(frame, Delta):
            self._take_delta(frame)
        elif isinstance(frame, Queued):
            self._seen.keep_alives += 1
        elif isinstance(frame, Accepted):
            if not self.accepted:
                self._progress()
            self.accepted = True
        elif isinstance(frame, ErrorFrame) and REFUSED in message.headers:
            self.failed = True  # no end: a good client goes on if it has sent the request again
        else:
            self._take_end(frame)

    def _take_delta(self, delta: Delta) -> None:
        first = self._deltas.setdefault((delta.index, delta.start), delta)
        if first is delta:
            self._progress()
        elif not is_repetition(first, delta):
            self.conflicts.append(f"{first} came again as {delta}")

    def _take_end(self, frame: Final | Result | ErrorFrame) -> None:
        self.failed |= isinstance(frame, ErrorFrame)
        if not self._ends:
            self._progress()
        elif not _same_end(self._ends[0], frame):
            self.conflicts.append(f"it ended as {self._ends[0]} and as {frame}")
        self._ends.append(frame)

    def _progress(self) -> None:
        self._seen.progress.append(time.monotonic())


def _same_end(first: Final | Result | ErrorFrame, other: Final | Result | ErrorFrame) -> bool:
    """Returns whether two last frames say the same, apart from how much of the prompt was cached."""
    if isinstance(first, ErrorFrame) or isinstance(other, ErrorFrame):
        return type(first) is type(other)
    return type(first) is type(other) and first.choices == other.choices


class HttpReader(Reader):
    """Reads `/v1/completions`. A request whose connection breaks is sent again with the same id, as the docs say."""

    def __init__(self, url: str, deadline: float) -> None:
        """For `deadline` seconds a request that is refused is sent again; the gateway gives it its own deadline."""
        self._url = urlsplit(url)
        self._deadline = deadline

    @override
    async def close(self) -> None:
        pass  # each request has a connection of its own

    @override
    async def read(self, request: Request, seen: Seen) -> None:
        body = _http_body(request)
        reached = 0
        try:
            async with asyncio.timeout(self._deadline + TIMEOUT_MS / 1000 + PATIENCE):
                while True:
                    exchange = _Exchange(seen, reached)
                    if await self._attempt(request, body, seen, exchange):
                        break
                    if seen.begun:
                        seen.broken_off.append(seen.choices)
                    reached = max(reached, exchange.characters)
                    seen.choices = {}
                    await asyncio.sleep(AGAIN_AFTER)
        except TimeoutError:
            seen.hung = True
        seen.ended = time.monotonic()

    async def _attempt(self, request: Request, body: bytes, seen: Seen, exchange: "_Exchange") -> bool:
        """Sends the request once; returns whether that was the last time."""
        parser = HttpResponseParser(exchange)
        try:
            await self._exchange(request, body, parser, exchange, seen)
        except (OSError, HttpParserError):
            seen.reconnections += 1
            return False
        if seen.cancelled:
            seen.complete = False
            return True
        if not exchange.complete:
            seen.reconnections += 1
            return False
        if parser.get_status_code() in {429, 503} and time.monotonic() < seen.began + self._deadline:
            seen.refusals.append(Refusal(time.monotonic(), exchange.whole(), accepted=False))
            return False
        if exchange.unavailable and not seen.begun and time.monotonic() < seen.began + self._deadline:
            seen.refusals.append(Refusal(time.monotonic(), seen.error, accepted=True))
            seen.error = ""
            return False
        if parser.get_status_code() != 200:
            seen.error = f"status {parser.get_status_code()}: {exchange.whole()}"
        elif not request.streamed:
            exchange.take(json.loads(exchange.whole()))
        return True

    async def _exchange(
        self, request: Request, body: bytes, parser: HttpResponseParser, exchange: "_Exchange", seen: Seen
    ) -> None:
        slow = request.shape == "slow"
        size = SLOW_READ if slow else 1 << 16
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port, limit=size)
        try:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {self._url.netloc}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            while not exchange.complete and (chunk := await reader.read(size)):
                parser.feed_data(chunk)
                if request.streamed and parser.get_status_code() == 200:
                    exchange.take_events()
                if request.cancel_after and exchange.events >= request.cancel_after and not exchange.complete:
                    seen.cancelled = True
                    return
                if slow:
                    await asyncio.sleep(SLOW / request.sampling["max_tokens"])
        finally:
            writer.close()


def _http_body(request: Request) -> bytes:
    sampling = dict(request.sampling)
    if sampling.pop("beam_width", 0):
        sampling["use_beam_search"] = True
    fields = {"prompt": request.prompt, "request_id": secrets.token_hex(12), "stream": request.streamed}
    if request.model:
        fields["model"] = request.model
    return json.dumps(fields | sampling).encode()


class _Exchange:
    """One answer over HTTP; the parser calls its methods."""

    def __init__(self, seen: Seen, reached: int) -> None:
        """`reached`: characters that an earlier connection has brought: only what is beyond them is progress."""
        self.complete = False
        self.unavailable = False
        """Whether a stream that had begun has ended with an error that asks to send the request again."""
        self.events = 0
        self.characters = 0
        self._seen = seen
        self._reached = reached
        self._body = b""

    def on_body(self, body: bytes) -> None:
        """Takes the next part."""
        self._body += body

    def on_message_complete(self) -> None:
        """Notes the end."""
        self.complete = True

    def whole(self) -> str:
        """Returns what has arrived and was not taken."""
        return self._body.decode(errors="replace")

    def take_events(self) -> None:
        """Takes all complete events."""
        events, self._body = split_events(self._body)
        for event in events:
            self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        """Takes an event of a stream, or an answer that is no stream."""
        if "error" in event:
            self._seen.error = event["error"]["message"]
            self.unavailable = event["error"].get("code") == Unavailable.kind
            return
        self.events += 1
        for part in event["choices"]:
            choice = self._seen.choice(part["index"])
            choice.text += part["text"]
            self.characters += len(part["text"])
            choice.finish_reason = part["finish_reason"] or choice.finish_reason
            choice.stop_reason = part["stop_reason"] if part["finish_reason"] else choice.stop_reason
        if self.characters > self._reached or self.complete:
            self._seen.progress.append(time.monotonic())
