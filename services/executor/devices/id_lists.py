"""Lists of token ids by slot, as one table."""

from collections.abc import Sequence

import numpy as np

from pagewire.services.executor.devices.protocol import Int64


class IdLists:
    """One list per slot.

    Attributes:
        table: [slots, longest list], padded with -1. Replaced by a larger array when a longer list is set.
    """

    def __init__(self, slots: int) -> None:
        self.table: Int64 = np.empty((slots, 0), np.int64)

    def set(self, slot: int, ids: Sequence[int] | Int64) -> None:
        """Replaces the list of a slot."""
        if (missing := len(ids) - self.table.shape[1]) > 0:
            self.table = np.pad(self.table, ((0, 0), (0, missing)), constant_values=-1)
        self.table[slot] = -1
        self.table[slot, : len(ids)] = ids
