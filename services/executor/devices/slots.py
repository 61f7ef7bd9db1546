"""What a device remembers of its slots between steps: block tables and how to sample."""

from collections.abc import Sequence

import numpy as np

from services.executor.devices.protocol import Capacity, Int64, SlotSampling
from services.executor.sampling import SamplingRows


class DeviceSlots:
    """Rows by slot number, as columns, so that a step gathers them without a loop."""

    def __init__(self, capacity: Capacity) -> None:
        slots = capacity.max_num_seqs
        self.tables = np.zeros((slots, -(-capacity.max_model_len // capacity.block_size)), np.int64)
        """[slots, blocks of the longest sequence]; beyond a slot's own blocks the entries mean nothing."""
        self._counts = [0] * slots
        self._temperature = np.zeros(slots)
        self._top_p = np.ones(slots)
        self._top_k = np.zeros(slots, np.int64)
        self._min_p = np.zeros(slots)
        self._keys = np.zeros(slots, np.uint64)
        self._floors = np.zeros(slots, np.int64)
        self._stop_ids: list[tuple[int, ...]] = [()] * slots

    def add(self, slot: int, blocks: Sequence[int], sampling: SlotSampling) -> None:
        """See `Device.add`."""
        self.tables[slot, : len(blocks)] = blocks
        self._counts[slot] = len(blocks)
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._min_p[slot] = sampling.min_p
        self._keys[slot] = sampling.key
        self._floors[slot] = sampling.floor
        self._stop_ids[slot] = sampling.stop_ids

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """See `Device.extend`."""
        for slot, block in zip(slots, blocks, strict=True):
            self.tables[slot, self._counts[slot]] = block
            self._counts[slot] += 1

    def sampling(self, slots: Int64, positions: Int64) -> SamplingRows:
        """How the tokens at `positions` [R] of `slots` [R] are picked."""
        early = np.flatnonzero(positions < self._floors[slots]).tolist()
        return SamplingRows(
            temperature=self._temperature[slots],
            top_p=self._top_p[slots],
            top_k=self._top_k[slots],
            min_p=self._min_p[slots],
            keys=self._keys[slots],
            positions=positions,
            banned=[(row, self._stop_ids[slots[row]]) for row in early],
        )
