"""The bookkeeping after a step in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.step.sequence_state import SequenceState


def reference(
    state: SequenceState,
    slots: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_places: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    ends: torch.Tensor,
    stop_ids: torch.Tensor,
    sampled: torch.Tensor,
) -> list[int]:
    """Changes `state` as `bookkeeping` does, and returns `finishes`."""
    finishes = []
    for row, slot in enumerate(slots.tolist()):
        start, (first, last) = int(num_computed_tokens[row]), cu_places[row : row + 2].tolist()
        end = int(ends[first]) if first < last else -1
        finish = wrong = 0
        if end >= 0:
            drafts = state.tokens[slot, end : end + last - first - 1].tolist()
            count = 1
            while count < last - first and int(sampled[first + count - 1]) == drafts[count - 1]:
                count += 1
            kept = sampled[first : first + count]
            wrong, token = last - first - count, int(kept[-1])
            room = kept[: max(state.tokens.shape[1] - end, 0)]
            state.tokens[slot, end : end + len(room)] = room
            state.known[slot] = end + count
            finish = 1 if token in stop_ids[slot].tolist() else 2 if end + count >= state.last[slot] else 0
            finish = 3 if token < 0 else finish
            if finish:
                state.alive[slot] = 0
        if start >= 0:
            state.computed[slot] = start + int(cu_queries[row + 1] - cu_queries[row]) - wrong
        finishes.append(finish)
    return finishes
