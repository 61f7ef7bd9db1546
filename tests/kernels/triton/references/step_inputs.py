"""The inputs of a step in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.step.sequence_state import SequenceState


def reference(
    state: SequenceState,
    slots: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_places: torch.Tensor,
    dummy: int,
    block_size: int,
    count: int,
    sampled: int,
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Returns (id, position, block) of every token, (start, length) of every row and (slot, end, token, drafts) of
    every place after `step_inputs`."""
    tokens = [[0, 0, dummy] for _ in range(count)]
    places = [[0, -1, 0, 0] for _ in range(sampled)]
    rows = []
    for row, slot in enumerate(slots.tolist()):
        first, last = cu_queries[row : row + 2].tolist()
        start, known = int(state.computed[slot]), int(state.known[slot])
        end = start + last - first
        first_place, behind_places = cu_places[row : row + 2].tolist()
        for place in range(first_place, behind_places):
            behind = behind_places - 1 - place
            places[place] = [slot, -1, max(last - 1 - behind, 0), place - first_place]
        if not state.alive[slot] or first == last or end > min(known, int(state.limit[slot])):
            rows.append([-1, 0])
            continue
        rows.append([start, end])
        for place in range(first_place, behind_places if end == known else first_place):
            places[place][1] = end - (behind_places - 1 - place)
        for position in range(start, end):
            block = int(state.block_tables[slot, position // block_size])
            tokens[first + position - start] = [int(state.tokens[slot, position]), position, block]
    return tokens, rows, places
