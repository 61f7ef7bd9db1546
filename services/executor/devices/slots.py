"""What a device remembers of its slots between steps: block tables and how to sample."""

from collections.abc import Sequence

import numpy as np

from pagewire.services.executor.devices.protocol import Capacity, Int64, SlotSampling
from pagewire.services.executor.sampling import SamplingRows


class DeviceSlots:
    """Rows by slot number, as columns, so that a step gathers them without a loop."""

    def __init__(self, capacity: Capacity) -> None:
        slots = capacity.max_num_seqs
        self.tables = np.zeros((slots, -(-capacity.max_model_len // capacity.block_size)), np.int64)
        """[slots, blocks of the longest sequence]; beyond a slot's own blocks the entries mean nothing."""
        self._counts = [0] * slots
        self.temperature = np.zeros(slots)
        self.top_p = np.ones(slots)
        self.top_k = np.zeros(slots, np.int64)
        self.min_p = np.zeros(slots)
        self.keys = np.zeros(slots, np.uint64)
        self.floors = np.zeros(slots, np.int64)
        self.stop_ids = np.empty((slots, 0), np.int64)
        """[slots, longest list], filled up with -1. These columns are those of `SlotSampling`."""
        self.candidates = np.zeros(slots, np.int64)

    def add(self, slot: int, blocks: Sequence[int], sampling: SlotSampling) -> None:
        """See `Device.add`."""
        self.tables[slot, : len(blocks)] = blocks
        self._counts[slot] = len(blocks)
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.min_p[slot] = sampling.min_p
        self.keys[slot] = sampling.key
        self.floors[slot] = sampling.floor
        self.candidates[slot] = sampling.candidates
        if (missing := len(sampling.stop_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(sampling.stop_ids)] = sampling.stop_ids

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """See `Device.extend`."""
        for slot, block in zip(slots, blocks, strict=True):
            self.tables[slot, self._counts[slot]] = block
            self._counts[slot] += 1

    def greedy(self, slots: Int64, positions: Int64) -> bool:
        """Whether of all tokens at `positions` [R] of `slots` [R] the likeliest one is wanted, and nothing else."""
        drawn, told, bound = self.temperature[slots], self.candidates[slots], positions < self.floors[slots]
        return not (np.count_nonzero(drawn) or np.count_nonzero(told) or np.count_nonzero(bound))

    def sampling(self, slots: Int64, positions: Int64) -> SamplingRows:
        """How the tokens at `positions` [R] of `slots` [R] are picked."""
        early = np.flatnonzero(positions < self.floors[slots]).tolist()
        banned = self.stop_ids[slots]
        return SamplingRows(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            min_p=self.min_p[slots],
            keys=self.keys[slots],
            positions=positions,
            banned=[(row, tuple(banned[row][banned[row] >= 0].tolist())) for row in early],
        )
