"""Sends the rows of a step and the changed entries of tables from the host to the device."""

import numpy as np
import torch

from pagewire.kernels.triton.step.scatter import scatter
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.cuda.staging import Int32, StagingRing
from pagewire.services.executor.devices.protocol import Int64

UPDATES = 16384
"""Changed entries per copy."""
_ALIGNED = 4
"""Entries between the starts of columns: kernels are compiled for addresses that are multiples of 16 bytes."""


class StepColumns:
    """The rows of the next step, in device memory that the steps of all buckets read.

    Attributes:
        cu_queries: int32 [max_num_seqs + 1], index of each row's first token.
        cu_places: int32 [max_num_seqs + 1], index of each row's first place: see `SampledPlaces`.
        slots: int32 [max_num_seqs], the slot of each row.
    """

    def __init__(self, runtime: Runtime, max_num_seqs: int, depth: int) -> None:
        """`depth`: copies that can be in flight before the host must wait for one."""
        self._places_from = _ALIGNED + _aligned(max_num_seqs + 1)
        self._slots_from = self._places_from + _aligned(max_num_seqs + 1)
        head = self._slots_from + _aligned(max_num_seqs)
        size = head + 3 * UPDATES
        self._memory = torch.zeros(size, dtype=torch.int32, device=runtime.device)
        self._count = self._memory[:1]
        self.cu_queries = self._memory[_ALIGNED : _ALIGNED + max_num_seqs + 1]
        self.cu_places = self._memory[self._places_from : self._places_from + max_num_seqs + 1]
        self.slots = self._memory[self._slots_from : self._slots_from + max_num_seqs]
        self._updates = self._memory[head:].view(-1, 3)
        self._head: Int32 = np.zeros(head, np.int32)
        self._ring = StagingRing(runtime, depth, size)

    def send(
        self,
        slots: Int64,
        query_lens: Int64,
        table: torch.Tensor,
        places: Int64,
        values: Int32,
        num_drafts: Int64 | None = None,
    ) -> None:
        """Enqueues the rows (`slots` [R], `query_lens` [R]) and table[places] = values; no place occurs twice.

        The last `num_drafts` [R] tokens of the rows are drafted; None: of none.

        `table` is int32 [N] on the device.
        """
        head, rows = self._head, len(slots)
        counts = np.ones(rows, np.int64) if num_drafts is None else num_drafts + 1
        for begin, sizes in ((_ALIGNED, query_lens), (self._places_from, counts)):
            ends = head[begin + 1 : begin + len(self.slots) + 1]
            ends[:rows] = sizes.cumsum()
            ends[rows:] = sizes.sum()
        head[self._slots_from : self._slots_from + rows] = slots
        for first in range(0, max(len(places), 1), UPDATES):
            part = slice(first, first + UPDATES)
            count = head[0] = len(places[part])
            updates = np.zeros((count, 3), np.int32)
            updates[:, 1], updates[:, 2] = places[part], values[part]
            self._ring.send(np.concatenate((head, updates.ravel())), self._memory)
            if count:
                scatter(table[None], self._updates[:count], self._count)


def _aligned(entries: int) -> int:
    return -(-entries // _ALIGNED) * _ALIGNED
