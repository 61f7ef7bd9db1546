"""The bookkeeping after a step in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.step.sequence_state import SequenceState


def reference(
    state: SequenceState,
    slots: torch.Tensor,
    cu_queries: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    ends: torch.Tensor,
    stop_ids: torch.Tensor,
    sampled: torch.Tensor,
) -> list[int]:
    """Changes `state` as `bookkeeping` does, and returns `finishes`."""
    finishes = []
    for row, slot in enumerate(slots.tolist()):
        start, end, token = int(num_computed_tokens[row]), int(ends[row]), int(sampled[row])
        finish = 0
        if start >= 0:
            state.computed[slot] = start + int(cu_queries[row + 1] - cu_queries[row])
        if end >= 0:
            if end < state.tokens.shape[1]:
                state.tokens[slot, end] = token
            state.known[slot] = end + 1
            finish = 1 if token in stop_ids[slot].tolist() else 2 if end + 1 >= state.last[slot] else 0
            finish = 3 if token < 0 else finish
            if finish:
                state.alive[slot] = 0
        finishes.append(finish)
    return finishes
