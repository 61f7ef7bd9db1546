"""The other side of the SplitFuse ablation: prompts first, and whole, as vLLM 0.2 scheduled them."""

import numpy as np

from services.executor.slots import SlotTable
from shared.splitfuse import Pending


class PrefillFirst(SlotTable):
    """While a prompt waits, steps are made of prompts alone, and every decode stands still.

    The plan's budget is the cap of a prompt step (vLLM 0.2: `max_num_batched_tokens`): as many whole prompts as it
    holds, in order, and at least one.
    """

    def pending(self) -> Pending:
        """See `SlotTable.pending`: what must stand still is left out."""
        pending = SlotTable.pending(self)
        prompts = pending.remaining > 1
        if not prompts.any():
            return pending
        whole = np.cumsum(pending.remaining * prompts) <= self._budget
        chosen = prompts & whole if (prompts & whole).any() else prompts & (np.cumsum(prompts) == 1)
        return Pending(*(column[chosen] for column in pending))
