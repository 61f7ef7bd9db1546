"""Composes steps as vLLM 0.2 did, whole prompts first, for comparison with SplitFuse."""

import numpy as np
from typing_extensions import override

from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.shared.splitfuse import PendingTokens


class PrefillFirst(SlotTable):
    """While a prompt waits, steps are made of prompts alone, and every decode stands still.

    The plan's budget is the cap of a prompt step (vLLM 0.2: `max_num_batched_tokens`): as many whole prompts as it
    holds, first come, first served, and at least one.
    """

    @override
    def pending(self) -> PendingTokens:
        """Returns the prompts alone while there are any."""
        pending = SlotTable.pending(self)
        prompts = np.flatnonzero(pending.remaining > 1)
        if not len(prompts):
            return pending
        prompts = prompts[np.argsort(self._sequences[pending.slots[prompts]])]
        whole = int((np.cumsum(pending.remaining[prompts]) <= self._budget).sum())
        return PendingTokens(*(column[prompts[: max(whole, 1)]] for column in pending))
