"""The calls of rank 0 that the other ranks repeat with their parts of the model, in memory that all of them share."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.cpu.collectives import SharedMemoryCollectives
from pagewire.services.executor.devices.protocol import Bool, Capacity, Int64, StepBatch
from pagewire.services.executor.rank_processes import MAX_RANKS

HEARTBEATS = 8
"""Entries in front of the heartbeats: call, rows, tokens, threads, whether rows have adapters, and the rest of a
line of the cache."""
HEADER = HEARTBEATS + MAX_RANKS
"""Entries in front of the columns."""


class Call(IntEnum):
    """Kind of a call, which all ranks compute."""

    FORWARD = 0
    """The layers of the model, for the rows of a step."""
    LOGITS = 1
    ARGMAX = 2
    """The ids of the largest logits."""
    COPY = 3
    """Copies blocks of the KV pool."""
    FORGET = 4
    """Frees adapters."""


@dataclass(frozen=True, slots=True)
class CallSizes:
    """The largest numbers that a call has."""

    rows: int
    tokens: int
    width: int
    """Features of a hidden state."""
    tables: tuple[int, int, int]
    """Shape of the block tables: groups of layers, slots, entries."""

    @classmethod
    def of(cls, capacity: Capacity, width: int) -> "CallSizes":
        """Returns the sizes of a device: a sequence has at most its whole context in one step.

        >>> CallSizes.of(Capacity(8, 16, max_num_seqs=4, max_model_len=32, vocab_size=9), width=64)
        CallSizes(rows=4, tokens=128, width=64, tables=(1, 4, 2))
        """
        slots, length = capacity.max_num_seqs, capacity.max_model_len
        entries = -(-length // capacity.block_size)
        return cls(slots, slots * length, width, (len(capacity.windows), slots, entries))

    @property
    def integers(self) -> int:
        """Number of int64 entries of all columns."""
        groups, slots, entries = self.tables
        return HEADER + 4 * self.rows + self.tokens + groups * slots * entries

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, of which untouched pages take none."""
        return 8 * self.integers + 4 * self.rows * self.width


class SharedCalls:
    """The arguments of the current call. Rank 0 writes them; the other ranks read them until they have ended the call.

    Attributes:
        tables: [groups, slots, entries] the block tables of the slots, which rank 0 changes between calls.
        heartbeats: [ranks] the number of each rank's heartbeats, which grows as long as its process is not stopped.
    """

    def __init__(self, memory: mmap.mmap, sizes: CallSizes, collectives: SharedMemoryCollectives) -> None:
        """`memory` has the bytes of `sizes`, and is zeros at first."""
        self._collectives = collectives
        integers = np.frombuffer(memory, np.int64, sizes.integers)
        first, rows = HEADER, sizes.rows
        self._header, self.heartbeats = integers[:HEARTBEATS], integers[HEARTBEATS:first]
        self._columns = integers[first : first + 4 * rows].reshape(4, rows)
        self._ids = integers[first + 4 * rows : first + 4 * rows + sizes.tokens]
        self.tables: Int64 = integers[first + 4 * rows + sizes.tokens :].reshape(sizes.tables)
        hidden = np.frombuffer(memory, np.float32, rows * sizes.width, 8 * sizes.integers)
        self._hidden = torch.from_numpy(hidden).view(rows, sizes.width)
        self._all: Bool = np.ones(rows, np.bool_)

    @property
    def rows(self) -> int:
        """Maximum rows of hidden states of a call."""
        return len(self._hidden)

    @property
    def copies(self) -> int:
        """Maximum blocks that a call copies, and adapters that it frees."""
        return len(self._ids) // 2

    def forward(self, batch: StepBatch, threads: int, adapters: Int64 | None = None) -> None:
        """Begins the layers of a step, on so many threads per rank.

        `adapters` [R] are the numbers of the rows' adapters, -1 where there is none; None: no row has any.
        """
        rows, tokens = len(batch.slots), len(batch.token_ids)
        self._open(Call.FORWARD, rows, tokens, threads)
        columns = self._columns[:, :rows]
        columns[0], columns[1], columns[2] = batch.slots, batch.num_computed_tokens, batch.query_lens
        self._header[4] = adapters is not None
        if adapters is not None:
            columns[3] = adapters
        self._ids[:tokens] = batch.token_ids
        self._collectives.begin_call()

    def head(self, call: Call, hidden: Tensor, threads: int) -> None:
        """Begins `LOGITS` or `ARGMAX` of hidden states [R, D], at most `rows`."""
        self._open(call, len(hidden), 0, threads)
        self._hidden[: len(hidden)] = hidden
        self._collectives.begin_call()

    def copy(self, sources: Int64, targets: Int64) -> None:
        """Begins to copy blocks, at most `copies`."""
        count = len(sources)
        self._open(Call.COPY, 0, count, 1)
        self._ids[:count], self._ids[count : 2 * count] = sources, targets
        self._collectives.begin_call()

    def forget(self, adapters: Sequence[int]) -> None:
        """Begins to free adapters by their numbers, at most `copies`."""
        self._open(Call.FORGET, 0, len(adapters), 1)
        self._ids[: len(adapters)] = adapters
        self._collectives.begin_call()

    def take(self) -> tuple[Call, int]:
        """Waits for the next call of rank 0; returns it and its number of threads. It must be ended before the next.

        Raises:
            RanksAborted: a rank is lost.
        """
        self._collectives.await_call()
        return Call(int(self._header[0])), int(self._header[3])

    @property
    def batch(self) -> StepBatch:
        """The step of the current `FORWARD`, with every row marked as one that samples: only rank 0 samples."""
        rows, tokens = int(self._header[1]), int(self._header[2])
        slots, computed, lengths = self._columns[:3, :rows]
        return StepBatch(slots, computed, lengths, self._ids[:tokens], self._all[:rows])

    @property
    def adapters(self) -> Int64 | None:
        """The numbers of the adapters of the rows of `FORWARD`, as in `forward`."""
        return self._columns[3, : int(self._header[1])] if self._header[4] else None

    @property
    def forgotten(self) -> Int64:
        """The numbers of the adapters that the current `FORGET` frees."""
        return self._ids[: int(self._header[2])]

    @property
    def hidden(self) -> Tensor:
        """The hidden states [R, D] of `LOGITS` or `ARGMAX`."""
        return self._hidden[: int(self._header[1])]

    @property
    def blocks(self) -> tuple[Int64, Int64]:
        """Sources and targets of `COPY`."""
        count = int(self._header[2])
        return self._ids[:count], self._ids[count : 2 * count]

    def _open(self, call: Call, rows: int, tokens: int, threads: int) -> None:
        """Waits until the arguments of the previous call are read, and writes the header."""
        self._collectives.await_others()
        self._header[:4] = call, rows, tokens, threads
