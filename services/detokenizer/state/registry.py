"""The streams in memory, open ones and ended ones. Ended streams are also rebuilt from their records in the store."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagewire.services.detokenizer.state.restore import restore
from pagewire.services.detokenizer.state.stream import Stream, StreamState
from pagewire.shared.bus import Store
from pagewire.shared.bus.protocol import DONE_AGE
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.done import Done

MAX_OPEN = 8192
"""Streams that may be open at once."""
MAX_ENDED = 8192
"""Maximum number of ended streams in memory; the records of others remain in the store."""
MAX_ENDED_BYTES = 64 << 20
"""Maximum size of the ended streams in memory, as `_size` estimates it."""
KEEP_ENDED = DONE_AGE
"""Seconds for which an ended stream is kept in memory: as long as its record, which a full store may not have."""
STREAM_BYTES = 2048
"""Estimated size of a stream without tokens."""
TOKEN_BYTES = 128
"""Estimated size of a token and its text."""
REPORT_BYTES = 128
"""Estimated size of the log-probabilities at one position, without their packed ids and values."""

_done = Decoder(Done)


@dataclass(frozen=True, slots=True)
class _Kept:
    """An ended stream in memory."""

    stream: Stream
    expires: float
    """Time of the event loop until which it is kept."""
    size: int
    """Estimated bytes."""


class Registry:
    """Streams by request id."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[str, Stream] = {}
        self._ended: OrderedDict[str, _Kept] = OrderedDict()
        """The ended streams in the order in which they ended."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._ended_bytes = 0
        self._emptied = asyncio.Event()
        self._dropped: dict[str, None] = {}
        """Ids of the requests whose streams were dropped last."""

    @property
    def open(self) -> Iterable[Stream]:
        """The streams that have not ended."""
        return self._open.values()

    @property
    def latest_open(self) -> Iterator[Stream]:
        """The streams that have not ended, the newest first."""
        return reversed(self._open.values())

    @property
    def latest_ended(self) -> Iterator[Stream]:
        """The ended streams in memory, the one that ended last first."""
        return (kept.stream for kept in reversed(self._ended.values()))

    def __len__(self) -> int:
        """Number of streams that have not ended."""
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether no more streams can be opened."""
        return len(self._open) >= MAX_OPEN

    def find(self, request_id: str) -> Stream | None:
        """Returns the stream in memory."""
        if (stream := self._open.get(request_id)) is not None:
            return stream
        kept = self._ended.get(request_id)
        return None if kept is None else kept.stream

    async def recall(self, request_id: str) -> Stream | None:
        """Returns the stream in memory, else the ended stream that is rebuilt from its record.

        Raises:
            BusError: the record cannot be read now.
        """
        if (stream := self.find(request_id)) is not None:
            return stream
        data = await self._store.get_done(request_id)
        if (stream := self.find(request_id)) is not None or data is None:
            return stream
        record = _done.try_decode(data)
        if record is None:
            return None  # a record of another release: the request counts as new
        stream = restore(record)
        self._keep(stream)
        return stream

    def add(self, stream: Stream) -> None:
        """Adds an open stream."""
        self._dropped.pop(stream.request_id, None)
        self._open[stream.request_id] = stream

    def drop(self, stream: Stream) -> None:
        """Forgets an open stream, which another detokenizer owns."""
        if self._remove_open(stream):
            self._dropped[stream.request_id] = None
            if len(self._dropped) > MAX_OPEN:
                del self._dropped[next(iter(self._dropped))]

    def has_dropped(self, request_id: str) -> bool:
        """Returns whether a stream was dropped lately: another detokenizer owns it."""
        return request_id in self._dropped

    def move_to_ended(self, stream: Stream) -> None:
        """Keeps a stream that has ended for `KEEP_ENDED` more seconds."""
        assert stream.state is StreamState.ENDED
        self._remove_open(stream)
        self._keep(stream)

    async def wait_empty(self) -> None:
        """Returns once no stream is open."""
        while self._open:
            self._emptied.clear()
            await self._emptied.wait()

    def _remove_open(self, stream: Stream) -> bool:
        """Returns whether the stream was there."""
        if self._open.get(stream.request_id) is not stream:
            return False
        del self._open[stream.request_id]
        if not self._open:
            self._emptied.set()
        return True

    def _keep(self, stream: Stream) -> None:
        if stream.request_id in self._ended:
            self._remove_ended(stream.request_id)
        kept = _Kept(stream, asyncio.get_running_loop().time() + KEEP_ENDED, _size(stream))
        self._ended[stream.request_id] = kept
        self._ended_bytes += kept.size
        while len(self._ended) > MAX_ENDED or (self._ended_bytes > MAX_ENDED_BYTES and len(self._ended) > 1):
            self._remove_ended(next(iter(self._ended)))
        if self._sweep_timer is None:
            self._sweep()

    def _sweep(self) -> None:
        """Forgets the ended streams that are over their time, now and whenever the next one is."""
        loop = asyncio.get_running_loop()
        self._sweep_timer = None
        while self._ended and self._sweep_timer is None:
            request_id, kept = next(iter(self._ended.items()))
            if kept.expires <= loop.time():
                self._remove_ended(request_id)
            else:
                self._sweep_timer = loop.call_at(kept.expires, self._sweep)

    def _remove_ended(self, request_id: str) -> None:
        self._ended_bytes -= self._ended.pop(request_id).size


def _size(stream: Stream) -> int:
    """Estimates the bytes that an ended stream takes."""
    size = STREAM_BYTES + TOKEN_BYTES * stream.tokens + sum(map(len, stream.prompts))
    for reports in (*stream.prompt_logprobs, *(completion.logprobs or () for completion in stream.completions)):
        size += sum(REPORT_BYTES + len(each.ids) + len(each.values) for each in reports if each is not None)
    return size
