"""The state of a device's slots between steps: block tables and sampling parameters."""

from collections.abc import Sequence

import numpy as np

from pagewire.services.executor.devices.edits import SlotEdits, slot_edits
from pagewire.services.executor.devices.id_lists import IdLists
from pagewire.services.executor.devices.masks import Masks
from pagewire.services.executor.devices.protocol import Bool, Capacity, Edits, Int64
from pagewire.shared.sampling_parameters import PARAMETERS, RECORD, Record, record


class CpuSlots:
    """Arrays indexed by slot number, from which a step gathers its rows without a loop.

    Attributes:
        tables: [groups, slots, entries of the longest sequence] block ids; those after a slot's own are arbitrary.
        records: [slots] sampling parameters.
        num_candidates: [slots] the column of that name in `records`.
        num_logprobs: [slots] the column of that name in `records`.
        stop_ids: ids that end each slot's sequence.
        edits: edits of each slot's logits, or None.
        masks: tokens that the grammars of slots allow.
    """

    def __init__(self, capacity: Capacity, tables: Int64 | None = None) -> None:
        """`tables` are zeros of the shape below; None: those of an own array."""
        slots = capacity.max_num_seqs
        entries, groups = -(-capacity.max_model_len // capacity.block_size), len(capacity.windows)
        self.tables = np.zeros((groups, slots, entries), np.int64) if tables is None else tables
        self.records: Record = np.zeros(slots, RECORD)
        self.num_candidates: Int64 = self.records["num_candidates"]
        self.num_logprobs: Int64 = self.records["num_logprobs"]
        self.stop_ids = IdLists(slots)
        self.edits: list[SlotEdits | None] = [None] * slots
        self.masks = Masks(capacity)
        self._min_lengths: Int64 = self.records["min_length"]
        self._plain: Bool = np.ones(slots, np.bool_)
        self._edited: Bool = np.zeros(slots, np.bool_)
        self._capacity = capacity
        self._counts = [0] * slots

    def add(
        self, slot: int, blocks: Sequence[int], sampling: Record, stop_ids: Sequence[int], edits: Edits | None
    ) -> None:
        """Puts a sequence into a slot, as `Device.add` describes it."""
        groups = len(self.tables)
        entries = self._counts[slot] = len(blocks) // groups
        self.tables[:, slot, :entries] = np.reshape(blocks, (entries, groups)).T
        self.records[slot] = sampling
        self.stop_ids.set(slot, stop_ids)
        self.edits[slot] = None if edits is None else slot_edits(edits, self._capacity, self.masks.table[slot])
        self.masks.add(slot, None if edits is None else edits.grammar)
        self._edited[slot] = edits is not None
        self._plain[slot] = edits is None and all(sampling[name] == _NEUTRAL[name] for name in _WITH_EFFECT)

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Appends an entry to the block table of each of `slots`."""
        groups = len(self.tables)
        for i, slot in enumerate(slots):
            self.tables[:, slot, self._counts[slot]] = blocks[i * groups : (i + 1) * groups]
            self._counts[slot] += 1

    def greedy(self, slots: Int64, positions: Int64) -> bool:
        """Returns whether every token at `positions` [R] of `slots` [R] is a plain argmax, without candidates."""
        plain, early = self._plain[slots], positions < self._min_lengths[slots]
        return np.count_nonzero(plain) == len(slots) and not np.count_nonzero(early)

    def any_edits(self, slots: Int64, positions: Int64) -> bool:
        """Returns whether the logits of some token at `positions` [R] of `slots` [R] must be edited."""
        early = positions < self._min_lengths[slots]
        return bool(np.count_nonzero(early) or np.count_nonzero(self._edited[slots]))

    def append(self, slots: Int64, positions: Int64, tokens: Int64) -> None:
        """Adds the `tokens` [R] at `positions` [R] of `slots` [R] to what the edits of later tokens depend on."""
        for row in np.flatnonzero(self._edited[slots]).tolist():
            edits = self.edits[slots[row]]
            if edits is not None and tokens[row] >= 0:
                edits.append(int(positions[row]), int(tokens[row]))


_NEUTRAL = record()
_WITH_EFFECT = (*(parameter.name for parameter in PARAMETERS), "num_candidates", "num_logprobs")
"""Columns that change what is sampled or reported, but for the minimum length, which applies to some positions only."""
