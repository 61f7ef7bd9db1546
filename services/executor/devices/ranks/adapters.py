"""The adapters of several ranks: rank 0 gives each of the others its part, over a connection beside that of the steps.

Parts are packed while steps run. A number names an adapter on all ranks, and a step names the numbers of its rows: so
all ranks change from one adapter to another at the same step. Whoever calls the other ranks tells them which numbers
are no longer used, in the order of the steps.
"""

import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from itertools import count
from struct import Struct
from typing import Any

import msgspec
import numpy as np
from typing_extensions import override

from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.cut import cut_adapter
from pagewire.services.executor.devices.protocol import AdapterSlots, Int64, LoadedAdapter, StepBatch
from pagewire.services.executor.devices.ranks.startup import Connection
from pagewire.services.executor.models.model import ModelCut
from pagewire.shared.errors import ConfigurationError, DeviceLost

PACK_TIMEOUT = 120.0
"""Seconds within which a rank must have taken its part of an adapter, and as long again within which it must have
packed it; otherwise it counts as lost."""
HEADER = Struct("<QQ")
"""Header of each part of an adapter: its number, and the size of the pickle in bytes."""
DISCARDED_BYTES = 1 << 16
"""Bytes that are read at once of a part that memory cannot hold."""


class Packed(msgspec.Struct, frozen=True):
    """Says that a rank has packed its part of an adapter, or why it could not."""

    refusal: str = ""


class RankedAdapter:
    """An adapter that all ranks have."""

    def __init__(self, number: int, own: Any) -> None:
        """`own` is the packed part of rank 0."""
        self.number, self.own = number, own


class _OwnPart(LoadedAdapter):
    """The part of rank 0."""

    def __init__(self, whole: LoadedAdapter) -> None:
        self._whole = whole

    @property
    @override
    def packed(self) -> Any:
        return self._whole.packed.own


class LeadingAdapters(AdapterSlots):
    """The adapters of rank 0's slots, of which the other ranks have parts."""

    def __init__(
        self, own: AdapterSlots, part: ModelCut, connections: Sequence[Connection], lose: Callable[[int, str], None]
    ) -> None:
        """`own`: adapters of rank 0's `part` of the model. `connections` lead to the other ranks. `lose` is called
        with a rank that is lost, and the reason."""
        self.targets = own.targets
        self._own, self._connections, self._lose = own, connections, lose
        self._parts = [part.of_rank(rank) for rank in range(1 + len(connections))]
        self._numbers = count()
        self._slots: dict[int, LoadedAdapter] = {}
        self._unused: deque[int] = deque()

    @override
    def pack(self, adapter: Adapter) -> RankedAdapter:
        """Returns the adapter once all ranks have packed it. Called on one thread.

        Raises:
            ConfigurationError: a rank has no memory for it.
            DeviceLost: a rank has ended, or takes too long.
        """
        number = next(self._numbers)
        try:
            own = self._pack(number, adapter)
        except BaseException:
            self._unused.append(number)  # some ranks may have it
            raise
        packed = RankedAdapter(number, own)
        weakref.finalize(packed, self._unused.append, number).atexit = False
        return packed

    @override
    def assign(self, slot: int, adapter: LoadedAdapter) -> None:
        self._slots[slot] = adapter
        self._own.assign(slot, _OwnPart(adapter))

    @override
    def clear(self, slot: int) -> None:
        del self._slots[slot]
        self._own.clear(slot)

    def numbers(self, batch: StepBatch) -> Int64 | None:
        """Returns the number [R] of each row's adapter, -1 where it has none; None: no row has any."""
        if not self._slots:
            return None
        adapters = [self._slots.get(slot) for slot in batch.slots.tolist()]
        if not any(adapters):
            return None
        return np.array([-1 if adapter is None else adapter.packed.number for adapter in adapters])

    def unused(self, most: int) -> list[int]:
        """Returns numbers that no later step names, each once, `most` at a time: the other ranks can forget them."""
        return [self._unused.popleft() for _ in range(min(most, len(self._unused)))]

    def _pack(self, number: int, adapter: Adapter) -> Any:
        # All of them before the first is sent, as each that is sent is answered.
        messages = [pickle.dumps(cut_adapter(adapter, part)) for part in self._parts[1:]]
        for rank, (connection, message) in enumerate(zip(self._connections, messages, strict=True), 1):
            with self._losing(rank):
                connection.end.settimeout(PACK_TIMEOUT)
                connection.end.sendall(HEADER.pack(number, len(message)))
                connection.end.sendall(message)
        try:
            packed = self._own.pack(cut_adapter(adapter, self._parts[0]))
        finally:
            answers = []
            for rank, connection in enumerate(self._connections, 1):
                with self._losing(rank):
                    answers.append(connection.receive(Packed, PACK_TIMEOUT))
        for rank, answer in enumerate(answers, 1):
            if answer.refusal:
                raise ConfigurationError(f"rank {rank} cannot hold the adapter: {answer.refusal}")
        return packed

    @contextmanager
    def _losing(self, rank: int) -> Iterator[None]:
        """Reports a rank as lost that is gone, or too slow."""
        try:
            yield
        except (EOFError, OSError) as error:
            self._lose(rank, "does not pack an adapter")
            raise DeviceLost(f"rank {rank} does not pack an adapter") from error


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of an adapter, as a `LoadedAdapter`."""

    packed: Any


class FollowingAdapters:
    """The adapters of another rank, which packs its parts on a thread of its own."""

    def __init__(self, own: AdapterSlots, connection: Connection) -> None:
        """`own`: adapters of the rank's part of the model. `connection` leads to rank 0."""
        self._own, self._connection = own, connection
        self._parts: dict[int, _Part] = {}
        self._assigned: list[int] = []
        threading.Thread(target=self._take, name="adapters", daemon=True).start()

    def prepare(self, slots: Int64, numbers: Int64 | None) -> None:
        """Gives the rows of the next step, which are in `slots` [R], the adapters of these `numbers` [R]."""
        for slot in self._assigned:
            self._own.clear(slot)
        pairs = () if numbers is None else zip(slots.tolist(), numbers.tolist(), strict=True)
        adapted = {slot: self._parts[number] for slot, number in pairs if number >= 0}
        for slot, part in adapted.items():
            self._own.assign(slot, part)
        self._assigned = list(adapted)

    def forget(self, numbers: Sequence[int]) -> None:
        """Frees adapters that no later step names. The rank may lack some."""
        for number in numbers:
            self._parts.pop(number, None)

    def _take(self) -> None:
        """Packs parts until rank 0 ends the connection."""
        with self._connection.end, self._connection.end.makefile("rb") as parts, suppress(OSError):  # rank 0 has ended
            while len(header := parts.read(HEADER.size)) == HEADER.size:
                number, size = HEADER.unpack(header)
                self._connection.send(Packed(self._pack(number, size, parts)))

    def _pack(self, number: int, size: int, parts: BufferedReader) -> str:
        """Packs the next part, a pickle of `size` bytes; returns why it could not, in one line, or an empty text."""
        left = size
        try:
            pickled = memoryview(bytearray(size))
            while left and (read := parts.readinto(pickled[size - left :])):
                left -= read
            adapter = pickle.loads(pickled)  # noqa: S301 - from rank 0, which has started this process
            del pickled  # packing takes memory, too
            self._parts[number] = _Part(self._own.pack(adapter))
        except Exception as error:  # noqa: BLE001 - most say that memory is short, and rank 0 can do without the adapter
            while left and (discarded := parts.read(min(left, DISCARDED_BYTES))):
                left -= len(discarded)
            return str(error).partition("\n")[0] or "its memory is too small"
        return ""
