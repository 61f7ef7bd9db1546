"""The routing of a mixture of experts: the experts of a token, tokens grouped by expert, and the sum of outputs."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit

ROWS = 16
"""Pairs of a tile: a decode has few tokens per expert."""
BLOCK = 1024
"""Pairs that are read at a time, and features of a program of the sum."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The pairs of a token and an expert of one step, P in all. First come those whose expert this rank has, in the
    order of the experts."""

    pairs: torch.Tensor
    """int32 [P] index of each pair, of which token t has those from t * K on; undefined behind the rank's own."""
    places: torch.Tensor
    """int32 [P] place of each pair in `pairs`; -1: another rank has its expert."""
    tiles: torch.Tensor
    """int32 [tiles, 3] expert, counted from the rank's first one, first place and place after the last one of each
    tile; expert -1: it is empty."""


@jit
def choose_kernel(
    weights: tl.tensor,
    chosen: tl.tensor,
    logits: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    LANES: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: one token. NaN counts as minus infinity, and of minus infinities the first experts are taken."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    x = tl.load(logits + token * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    x = tl.where(tl.abs(x) >= 0, x, float("-inf"))
    peak = tl.max(x, 0)
    x = tl.exp(x - tl.where(peak > float("-inf"), peak, 0.0))
    x = tl.where(expert < EXPERTS, x / tl.maximum(tl.sum(x, 0), 1.0), -1.0)  # the largest weighs 1, if there is one
    lane = tl.arange(0, LANES)
    kept = tl.zeros([LANES], dtype=tl.float32)
    picked = tl.zeros([LANES], dtype=tl.int32)
    for place in tl.static_range(CHOSEN):
        best = tl.max(x, 0)
        index = tl.min(tl.where(x == best, expert, EXPERTS - 1), 0)
        kept = tl.where(lane == place, best, kept)
        picked = tl.where(lane == place, index, picked)
        x = tl.where(expert == index, -1.0, x)
    if NORMALIZED:
        total = tl.sum(kept, 0)
        kept = kept / tl.where(total > 0, total, 1.0)
    tl.store(weights + token * CHOSEN + lane, kept, mask=lane < CHOSEN)
    tl.store(chosen + token * CHOSEN + lane, picked, mask=lane < CHOSEN)


@jit
def group_kernel(
    pairs: tl.tensor,
    places: tl.tensor,
    tiles: tl.tensor,
    chosen: tl.tensor,
    count: tl.int32,
    most: tl.int32,
    lowest: tl.int32,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: the pairs of one of the EXPERTS from `lowest` on, which it finds among all. The last one also writes
    the empty tiles, and that the pairs of other experts have no place."""
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    index = tl.arange(0, PADDED)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([PADDED], dtype=tl.int32)
    for start in range(0, count, BLOCK):
        mask = start + lane < count
        number = tl.load(chosen + start + lane, mask=mask, other=0) - lowest
        held = mask & (number >= 0) & (number < EXPERTS)
        counts += tl.histogram(tl.where(held, number, 0), PADDED, mask=held)
        if expert == EXPERTS - 1:
            tl.store(places + start + lane, -1, mask=mask & ~held)
    first = tl.sum(tl.where(index < expert, counts, 0), 0)
    end = first + tl.sum(tl.where(index == expert, counts, 0), 0)
    tile = tl.sum(tl.where(index < expert, (counts + ROWS - 1) // ROWS, 0), 0)
    for begin in range(first, end, ROWS):
        tl.store(tiles + tile * 3, expert)
        tl.store(tiles + tile * 3 + 1, begin)
        tl.store(tiles + tile * 3 + 2, tl.minimum(begin + ROWS, end))
        tile += 1
    if expert == EXPERTS - 1:
        for empty in range(tile, most):
            tl.store(tiles + empty * 3, -1)
    if end > first:
        for start in range(0, count, BLOCK):
            mask = start + lane < count
            own = (tl.load(chosen + start + lane, mask=mask, other=-1) == lowest + expert).to(tl.int32)
            place = first + tl.cumsum(own, 0) - 1
            tl.store(pairs + place, start + lane, mask=own > 0)
            tl.store(places + start + lane, place, mask=own > 0)
            first += tl.sum(own, 0)


@jit
def combine_kernel(
    out: tl.tensor,
    made: tl.tensor,
    weights: tl.tensor,
    places: tl.tensor,
    size: tl.int32,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: BLOCK features of one token."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for chosen in tl.static_range(CHOSEN):
        weight = tl.load(weights + token * CHOSEN + chosen)
        row = tl.load(places + token * CHOSEN + chosen).to(tl.int64)
        real = (row >= 0) & (column < size)
        total += weight * tl.load(made + row * size + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


def choose(logits: torch.Tensor, count: int, *, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `count` largest probabilities of each token, float32 [T, count], and their experts, int32 [T, count].

    `logits` [T, experts] are contiguous. Of equal ones the first is taken. `normalized`: those of a token sum to 1.
    """
    tokens, experts = logits.shape
    weights = torch.empty(tokens, count, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, count, dtype=torch.int32, device=logits.device)
    sizes = {"EXPERTS": experts, "PADDED": triton.next_power_of_2(experts), "CHOSEN": count}
    sizes |= {"LANES": triton.next_power_of_2(count), "NORMALIZED": normalized, "num_warps": 1}
    choose_kernel[(tokens,)](weights, chosen, logits, **sizes, **launch_options())
    return weights, chosen


def group(chosen: torch.Tensor, experts: range) -> Groups:
    """Groups the experts `chosen` int32 [T, K] of each token, of which this rank has `experts`.

    All shapes follow from those of the arguments: any expert may be chosen by all tokens.
    """
    count, device = chosen.numel(), chosen.device
    most = triton.cdiv(count, ROWS) + min(len(experts), count)
    pairs, places = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    tiles = torch.empty(most, 3, dtype=torch.int32, device=device)
    sizes = {"EXPERTS": len(experts), "PADDED": bins(len(experts)), "ROWS": ROWS, "BLOCK": BLOCK}
    arguments = pairs, places, tiles, chosen, count, most, experts.start
    group_kernel[(len(experts),)](*arguments, **sizes, **launch_options())
    return Groups(pairs, places, tiles)


def bins(experts: int) -> int:
    """Returns the length of the counts of pairs by expert: at least one per thread."""
    return max(128, int(triton.next_power_of_2(experts)))


def combine(made: torch.Tensor, weights: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Returns [T, size]: the sum of each token's pairs in `made` [P, size] by `weights` float32 [T, K], in float32.

    Pairs of other ranks' experts add nothing.
    """
    (tokens, count), size = weights.shape, made.shape[1]
    out = torch.empty(tokens, size, dtype=made.dtype, device=made.device)
    grid = tokens, triton.cdiv(size, BLOCK)
    combine_kernel[grid](out, made, weights, groups.places, size, CHOSEN=count, BLOCK=BLOCK, **launch_options())
    return out
