"""The state of a device's slots between steps: block tables and sampling parameters."""

from collections.abc import Sequence

import numpy as np

from pagewire.services.executor.devices.id_lists import IdLists
from pagewire.services.executor.devices.protocol import Bool, Capacity, Int64
from pagewire.shared.sampling import PARAMETERS, RECORD, Record, record


class DeviceSlots:
    """Arrays indexed by slot number, from which a step gathers its rows without a loop.

    Attributes:
        tables: [slots, blocks of the longest sequence] block ids; entries after a slot's own blocks are arbitrary.
        records: [slots] sampling parameters.
        num_candidates: [slots] the column of that name in `records`.
        stop_ids: ids that end each slot's sequence.
    """

    def __init__(self, capacity: Capacity) -> None:
        slots = capacity.max_num_seqs
        self.tables = np.zeros((slots, -(-capacity.max_model_len // capacity.block_size)), np.int64)
        self.records: Record = np.zeros(slots, RECORD)
        self.num_candidates: Int64 = self.records["num_candidates"]
        self.stop_ids = IdLists(slots)
        self._min_lengths: Int64 = self.records["min_length"]
        self._plain: Bool = np.ones(slots, np.bool_)
        self._counts = [0] * slots

    def add(self, slot: int, blocks: Sequence[int], sampling: Record, stop_ids: Sequence[int]) -> None:
        """See `Device.add`."""
        self.tables[slot, : len(blocks)] = blocks
        self._counts[slot] = len(blocks)
        self.records[slot] = sampling
        self.stop_ids.set(slot, stop_ids)
        self._plain[slot] = all(sampling[name] == _NEUTRAL[name] for name in _WITH_EFFECT)

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """See `Device.extend`."""
        for slot, block in zip(slots, blocks, strict=True):
            self.tables[slot, self._counts[slot]] = block
            self._counts[slot] += 1

    def greedy(self, slots: Int64, positions: Int64) -> bool:
        """Returns whether every token at `positions` [R] of `slots` [R] is a plain argmax, without candidates."""
        plain, early = self._plain[slots], positions < self._min_lengths[slots]
        return np.count_nonzero(plain) == len(slots) and not np.count_nonzero(early)

    def banned(self, slots: Int64, positions: Int64) -> list[tuple[int, list[int]]]:
        """Returns the rows of `slots` [R] that must not end at `positions` [R] yet, with their stop ids."""
        early = np.flatnonzero(positions < self._min_lengths[slots]).tolist()
        ids = self.stop_ids.table
        return [(row, ids[slots[row]][ids[slots[row]] >= 0].tolist()) for row in early]


_NEUTRAL = record()
_WITH_EFFECT = (*(parameter.name for parameter in PARAMETERS), "num_candidates")
"""Columns that change what is sampled or reported, but for the minimum length, which applies to some positions only."""
