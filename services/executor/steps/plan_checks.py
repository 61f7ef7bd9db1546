"""Checks of a plan against the capacity of the device, before the slot table applies it."""

import numpy as np

from pagewire.services.executor.devices.edits import words_of
from pagewire.services.executor.devices.protocol import Capacity, Int64
from pagewire.services.executor.steps.packed_columns import column
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages.plan import AddSlot


class PlanViolation(PagewireError):
    """A plan contradicts the table or the device's capacity.

    Scheduler and executor no longer agree about the state, so the term must end and the executor must be claimed again.
    """


class PlanChecks:
    """Raises `PlanViolation` where a plan names something that the device does not have."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity

    def edits(self, added: AddSlot) -> None:
        """Checks the edits of a new sequence's logits."""
        sampling = added.sampling
        if len(sampling.bias_ids) != len(sampling.biases):
            raise PlanViolation(f"sequence {added.sequence} has not one bias per id")
        named = [column(sampling.stop_ids), column(sampling.bias_ids), column(sampling.allowed_ids)]
        if sampling.bad_words:
            named += words_of(column(sampling.bad_words))
        if any((ids >= self._capacity.vocab_size).any() for ids in named):
            raise PlanViolation(f"sequence {added.sequence} names token ids beyond the vocabulary")

    def count_entries(self, blocks: Int64) -> int:
        """Returns how many entries of a block table these `blocks` [N] are."""
        groups = len(self._capacity.windows)
        if len(blocks) % groups:
            raise PlanViolation(f"an entry of a block table has {groups} blocks, and the last one has fewer")
        return len(blocks) // groups

    def held(self, count: int) -> None:
        """Checks the number of entries that a slot holds."""
        capacity = self._capacity
        if count > -(-capacity.max_model_len // capacity.block_size):
            raise PlanViolation(f"a slot holds more blocks than a context of {capacity.max_model_len} needs")

    def reach(self, beyond: int) -> None:
        """Raises if a slot has positions `beyond` those that its blocks hold."""
        if beyond > 0:
            raise PlanViolation("a slot's limit or its computed positions lie beyond its blocks")

    def copies(self, sources: Int64, targets: Int64) -> None:
        """Checks the copies of blocks."""
        self.blocks(sources)
        self.blocks(targets)
        if np.isin(targets, sources).any() or len(np.unique(targets)) < len(targets):
            raise PlanViolation("the plan copies to a block that it copies from, or twice to the same")

    def blocks(self, blocks: Int64) -> None:
        """Checks the ids of blocks."""
        if (blocks >= self._capacity.num_blocks).any():
            raise PlanViolation(f"block {blocks.max()} is not one of the {self._capacity.num_blocks} blocks")
