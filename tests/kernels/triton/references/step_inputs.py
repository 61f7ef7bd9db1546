"""The inputs of a step in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.step.sequence_state import SequenceState


def reference(
    state: SequenceState, slots: torch.Tensor, cu_queries: torch.Tensor, dummy: int, block_size: int, count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns (id, position, block) of every token and (start, end, length) of every row after `step_inputs`."""
    tokens = [[0, 0, dummy] for _ in range(count)]
    rows = []
    for row, slot in enumerate(slots.tolist()):
        first, last = cu_queries[row : row + 2].tolist()
        start, known = int(state.computed[slot]), int(state.known[slot])
        end = start + last - first
        if not state.alive[slot] or first == last or end > min(known, int(state.limit[slot])):
            rows.append([-1, -1, 0])
            continue
        rows.append([start, end if end == known else -1, end])
        for position in range(start, end):
            block = int(state.block_tables[slot, position // block_size])
            tokens[first + position - start] = [int(state.tokens[slot, position]), position, block]
    return tokens, rows
