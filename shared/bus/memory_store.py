"""The store of the in-memory bus: it delivers as JetStream does, but keeps nothing on disk."""

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from typing_extensions import override

from pagewire.shared.bus.framing import header_block
from pagewire.shared.bus.protocol import LIST_BATCH, Headers, Item, QueueLengths, Store, StoredItem
from pagewire.shared.errors import MessageTooLarge


@dataclass(slots=True)
class _Entry:
    """A stored item."""

    queue: str
    sequence: int
    data: bytes
    headers: Headers
    stored_at: float
    deliveries: int = 0
    redelivery: asyncio.TimerHandle | None = None
    """Timer that redelivers the item; None while the item waits in its queue."""


class _Queue:
    """The waiting items of one queue: redeliveries first, then by age."""

    def __init__(self) -> None:
        self._ready: list[_Entry] = []
        self._nonempty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, entry: _Entry) -> None:
        """Adds an entry."""
        bisect.insort(self._ready, entry, key=lambda other: (other.deliveries == 0, other.sequence))
        self._nonempty.set()

    def remove(self, entry: _Entry) -> None:
        """Removes an entry."""
        self._ready.remove(entry)

    async def take(self, count: int) -> list[_Entry]:
        """Waits for an entry, then removes and returns up to `count`."""
        while not self._ready:
            self._nonempty.clear()
            await self._nonempty.wait()
        entries, self._ready = self._ready[:count], self._ready[count:]
        return entries


class MemoryStore(Store):
    """The `Store` of a `MemoryBroker`."""

    def __init__(self, *, max_payload: int, ack_wait: float, done_age: float) -> None:
        self._max_payload = max_payload
        self._ack_wait = ack_wait
        self._done_age = done_age
        self._queues: dict[str, _Queue] = {}
        self._entries: dict[str, _Entry] = {}
        self._done: dict[str, tuple[float, bytes]] = {}
        self._sequence = 0
        self._term = 0

    @override
    async def put_work(self, queue: str, data: bytes, *, headers: Headers | None = None) -> int:
        self._check_size(data, headers)
        self._sequence += 1
        entry = _Entry(queue, self._sequence, data, dict(headers or {}), time.time())
        self._entries[str(entry.sequence)] = entry
        self._queue(queue).add(entry)
        return entry.sequence

    @override
    def now(self) -> float:
        return time.time()

    @override
    async def read_clock(self) -> float:
        await asyncio.sleep(0)
        return 0.0

    @override
    async def check(self) -> None:
        """Memory always has room."""

    @override
    async def pull_work(self, queue: str, count: int, *, expires: float) -> list[Item]:
        try:
            async with asyncio.timeout(expires):
                entries = await self._queue(queue).take(count)
        except TimeoutError:
            return []
        return [self._hand_out(entry) for entry in entries]

    @override
    async def queue_lengths(self, prefix: str) -> QueueLengths:
        queues = (entry.queue for entry in self._entries.values())
        return QueueLengths(Counter(queue for queue in queues if queue.startswith(f"{prefix}.")), self._sequence)

    @override
    async def list_work(self, prefix: str, after: int = 0) -> list[StoredItem]:
        await asyncio.sleep(0)
        entries = (e for e in self._entries.values() if e.sequence > after and e.queue.startswith(f"{prefix}."))
        return [StoredItem(e.sequence, e.data, e.headers) for e in islice(entries, LIST_BATCH)]

    @override
    async def missing_work(self, numbers: Collection[int]) -> set[int]:
        await asyncio.sleep(0)
        return {number for number in numbers if str(number) not in self._entries}

    @override
    async def undelivered(self, queue: str) -> int:
        return len(self._queue(queue))

    @override
    async def deliver_anew(self, queue: str) -> None:
        for entry in self._entries.values():
            timer = entry.redelivery
            if entry.queue == queue and timer is not None:
                timer.cancel()
                self._take_back(entry)

    @override
    async def mend(self) -> list[str]:
        return []

    @override
    async def renew_work(self, ack: str) -> None:
        entry = self._find(ack)
        if entry is not None and entry.redelivery is not None:
            entry.redelivery.cancel()
            self._start_redelivery(entry)

    @override
    async def end_work(self, ack: str) -> None:
        entry = self._find(ack)
        if entry is None:
            return
        del self._entries[str(entry.sequence)]
        if entry.redelivery is not None:
            entry.redelivery.cancel()
        else:
            self._queue(entry.queue).remove(entry)

    @override
    async def return_work(self, ack: str) -> None:
        entry = self._find(ack)
        if entry is not None and entry.redelivery is not None:
            entry.redelivery.cancel()
            self._take_back(entry)

    @override
    async def put_done(self, request_id: str, data: bytes) -> None:
        self._check_size(data, None)
        self._forget_done()
        self._done.pop(request_id, None)
        self._done[request_id] = (asyncio.get_running_loop().time(), data)

    @override
    async def get_done(self, request_id: str) -> bytes | None:
        self._forget_done()
        record = self._done.get(request_id)
        return record[1] if record is not None else None

    @override
    async def next_term(self) -> int:
        self._term += 1
        return self._term

    def _check_size(self, data: bytes, headers: Headers | None) -> None:
        size = len(header_block(headers)) + len(data)
        if size > self._max_payload:
            raise MessageTooLarge(size, self._max_payload)

    def _queue(self, name: str) -> _Queue:
        return self._queues.setdefault(name, _Queue())

    def _find(self, ack: str) -> _Entry | None:
        """Finds an entry by the ack of any of its deliveries, not only the latest, as JetStream does."""
        return self._entries.get(ack.split(".")[-2])

    def _hand_out(self, entry: _Entry) -> Item:
        entry.deliveries += 1
        self._start_redelivery(entry)
        ack = f"$JS.ACK.memory.{entry.queue}.{entry.sequence}.{entry.deliveries}"
        return Item(entry.data, entry.headers, ack, entry.sequence, entry.deliveries, entry.stored_at)

    def _start_redelivery(self, entry: _Entry) -> None:
        entry.redelivery = asyncio.get_running_loop().call_later(self._ack_wait, self._take_back, entry)

    def _take_back(self, entry: _Entry) -> None:
        entry.redelivery = None
        self._queue(entry.queue).add(entry)

    def _forget_done(self) -> None:
        """Drops expired records."""
        oldest = asyncio.get_running_loop().time() - self._done_age
        for request_id in [name for name, (stored, _) in self._done.items() if stored < oldest]:
            del self._done[request_id]
