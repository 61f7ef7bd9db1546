"""The prompts whose log-probabilities are reported, by the slots of their sequences."""

import numpy as np

from pagewire.services.executor.devices.protocol import Int64


class ReportedPrompts:
    """Knows which token follows each position of these prompts."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # of each prompt, by slot

    def add(self, slot: int, length: int) -> None:
        """Adds the prompt of a slot, `length` tokens."""
        self._lengths[slot] = length

    def remove(self, slots: Int64) -> None:
        """Removes the prompts of these slots that have one."""
        for slot in slots.tolist() if self._lengths else ():
            self._lengths.pop(slot, None)

    def clear(self) -> None:
        """Removes all prompts."""
        self._lengths.clear()

    def next_ids(self, owners: Int64, positions: Int64, tokens: Int64) -> Int64 | None:
        """Returns `StepBatch.next_ids` of a step that computes the `positions` [T] of slots `owners` [T].

        `tokens` [slots, length] are the tokens of each slot.
        """
        reported = [slot for slot in np.unique(owners).tolist() if slot in self._lengths] if self._lengths else ()
        if not reported:
            return None
        next_ids = np.full(len(positions), -1, np.int64)
        for slot in reported:
            within = (owners == slot) & (positions + 1 < self._lengths[slot])
            next_ids[within] = tokens[slot, positions[within] + 1]
        return next_ids
