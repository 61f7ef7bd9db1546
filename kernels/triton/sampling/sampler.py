"""Samples one token per row: filters without a sort, then inverts the cumulative distribution.

A filter keeps the tokens at or above a lower bound on the logits. min-p gives the bound directly. top-k and top-p find
it by bisection, in which every step ends at a logit that occurs, so that the result is exact. Ties at the bound are
all kept.

The first kernel has a program per tile of the vocabulary, so that few rows use the whole GPU. With the largest logit
and the sum of each tile, the second one, of a program per row, reads the tile of its token only, if there is no filter.
A filter reads the tiles whose largest logit is not below its bound.
"""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.jit import jit
from pagewire.kernels.triton.sampling.philox import uniform
from pagewire.kernels.triton.sampling.sampling_columns import SamplingColumns
from pagewire.shared import sampling_parameters

TILE = 2048
WARPS = 16
INFINITY: tl.constexpr = tl.constexpr(float("inf"))
NOT_FINITE: tl.constexpr = tl.constexpr(sampling_parameters.NOT_FINITE)


@jit
def scaled_logits(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    token: tl.tensor,
    temperature: tl.tensor,
    VOCABULARY: tl.constexpr,
):
    """Returns float32 logits of the tokens, divided by the temperature; minus infinity beyond the vocabulary."""
    x = tl.load(logits + token, mask=token < VOCABULARY, other=float("-inf")).to(tl.float32)
    return x / temperature


@jit
def tile_sums_kernel(
    tiles: tl.tensor,
    logits: tl.tensor,
    slots: tl.tensor,
    ends: tl.tensor,
    temperature: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program: the largest scaled logit of one tile of one row, infinity if there is NaN, and the sum of the
    exponentials of the distances from it."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if tl.load(ends + row) < 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    heat = tl.load(temperature + slot)
    heat = tl.where(heat > 0, heat, 1.0)
    token = tile * TILE + tl.arange(0, TILE)
    start = logits + row * VOCABULARY
    x = scaled_logits(start, token, heat, VOCABULARY)
    top = tl.max(tl.where(tl.abs(x) >= 0, x, INFINITY), 0)
    tl.store(tiles + row * 2 * TILES + tile, top)
    finite = tl.abs(top) < INFINITY
    distance = tl.where(finite, x - tl.where(finite, top, 0.0), -INFINITY)
    tl.store(tiles + (row * 2 + 1) * TILES + tile, tl.sum(tl.exp(distance), 0))


@jit
def edge(  # type: ignore[no-untyped-def]
    low: tl.tensor,
    peak: tl.tensor,
    goal: tl.tensor,
    count: tl.tensor,
    maxima: tl.tensor,
    logits: tl.tensor,
    heat: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the largest logit t >= low such that tokens at or above t weigh at least `goal`; `low` if there is none.

    A token weighs 1 if `count` is set, else the exponential of its logit minus `peak`, the largest logit.
    """
    high = peak
    stride = 32.0
    while low < high:
        middle = (low + high) * 0.5
        if low == float("-inf"):
            middle = high - stride
            stride *= 2
        if middle <= low:  # there is no float between the two
            middle = high
        weight = tl.zeros([TILE], dtype=tl.float32)
        above = tl.full([TILE], INFINITY, dtype=tl.float32)
        below = tl.full([TILE], -INFINITY, dtype=tl.float32)
        for tile in range(TILES):
            if tl.load(maxima + tile) >= low:
                token = tile * TILE + tl.arange(0, TILE)
                x = scaled_logits(logits, token, heat, VOCABULARY)
                kept = x >= middle
                weight += tl.where(kept, tl.where(count, 1.0, tl.exp(x - peak)), 0.0)
                above = tl.where(kept, tl.minimum(above, x), above)
                below = tl.where(kept, below, tl.maximum(below, x))
        if tl.sum(weight, 0) >= goal:
            low = tl.min(above, 0)
        else:
            high = tl.maximum(tl.max(below, 0), low)
    return low


@jit
def tile_masses(  # type: ignore[no-untyped-def]
    low: tl.tensor,
    peak: tl.tensor,
    maxima: tl.tensor,
    logits: tl.tensor,
    heat: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Returns the sum of the weights of tokens at or above `low` in each tile, float64 [PADDED]."""
    index = tl.arange(0, PADDED)
    masses = tl.zeros([PADDED], dtype=tl.float64)
    for tile in range(TILES):
        if tl.load(maxima + tile) >= low:
            token = tile * TILE + tl.arange(0, TILE)
            x = scaled_logits(logits, token, heat, VOCABULARY)
            mass = tl.sum(tl.where(x >= low, tl.exp(x - peak), 0.0).to(tl.float64), 0)
            masses = tl.where(index == tile, mass, masses)
    return masses


@jit
def kth_largest(top: tl.tensor, count: tl.tensor, TILES: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the largest t that the largest logits of `count` tiles reach; minus infinity if there are fewer tiles."""
    index = tl.arange(0, PADDED)
    reached = tl.min(tl.where(index < count, tl.sort(top, descending=True), INFINITY), 0)
    return tl.where(count <= TILES, reached, -INFINITY)


@jit
def sample_kernel(
    tokens: tl.tensor,
    tiles: tl.tensor,
    logits: tl.tensor,
    slots: tl.tensor,
    ends: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    key: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + row)
    if end < 0:
        tl.store(tokens + row, -1)
        return
    slot = tl.load(slots + row).to(tl.int64)
    start = logits + row * VOCABULARY
    tops = tiles + row * 2 * TILES
    index = tl.arange(0, PADDED)
    top = tl.load(tops + index, mask=index < TILES, other=float("-inf"))
    peak = tl.max(top, 0)
    if tl.abs(peak) == INFINITY:
        tl.store(tokens + row, NOT_FINITE)
        return
    heat = tl.load(temperature + slot)
    greedy = heat <= 0
    heat = tl.where(greedy, 1.0, heat)
    lane = tl.arange(0, TILE)
    if greedy:
        tile = tl.min(tl.where(top == peak, index, TILES - 1), 0)
        token = tile * TILE + lane
        x = scaled_logits(start, token, heat, VOCABULARY)
        tl.store(tokens + row, tl.min(tl.where(x == peak, token, VOCABULARY - 1), 0))
        return

    sums = tl.load(tops + TILES + index, mask=index < TILES, other=0.0)
    masses = (sums * tl.exp(top - peak)).to(tl.float64)
    low = peak * 0 + float("-inf")
    part = tl.load(min_p + slot)
    if part > 0:
        low = peak + tl.log(part)
    most = tl.load(top_k + slot)
    if (most > 0) & (most < VOCABULARY):
        low = tl.maximum(low, kth_largest(top, most, TILES, PADDED))
        low = edge(
            low, peak, most.to(tl.float32), most > 0, tops, start, heat, VOCABULARY, TILES, TILE,
        )  # fmt: skip
    if low > float("-inf"):
        masses = tile_masses(low, peak, tops, start, heat, VOCABULARY, TILES, TILE, PADDED)
    share = tl.load(top_p + slot)
    if share < 1:
        mass = tl.sum(masses, 0).to(tl.float32)
        # If all tokens were as likely as one here, together they would weigh half of what may be left out.
        low = tl.maximum(low, tl.minimum(peak + tl.log(mass * (1 - share) / (2 * VOCABULARY)), peak))
        low = edge(
            low, peak, mass * share, most < 0, tops, start, heat, VOCABULARY, TILES, TILE,
        )  # fmt: skip
        masses = tile_masses(low, peak, tops, start, heat, VOCABULARY, TILES, TILE, PADDED)

    target = uniform(tl.load(key + slot), end) * tl.sum(masses, 0)
    reached = tl.cumsum(masses, 0)
    tile = tl.min(tl.where((reached > target) & (masses > 0), index, TILES - 1), 0)
    token = tile * TILE + lane
    x = scaled_logits(start, token, heat, VOCABULARY)
    weight = tl.where(x >= low, tl.exp(x - peak), 0.0).to(tl.float64)
    reached_here = tl.sum(tl.where(index < tile, masses, 0.0), 0) + tl.cumsum(weight, 0)
    picked = tl.min(tl.where((reached_here > target) & (weight > 0), token, VOCABULARY), 0)
    last = tl.max(tl.where(weight > 0, token, 0), 0)  # if rounding leaves no token above the target
    tl.store(tokens + row, tl.minimum(picked, last))


def sample(
    table: SamplingColumns,
    logits: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    tiles: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Writes the sampled token of every row to `tokens` int32 [R]; -1 where `ends` is negative.

    A row with NaN, or whose largest logit is infinite, gets `pagewire.shared.sampling_parameters.NOT_FINITE`.

    `logits` [R, vocabulary], after `edit_logits`, are contiguous and of any float type; `slots` is int32 [R]; `ends`
    int32 [R] is the position of the token to sample; `tiles` float32 [R, 2, ceil(vocabulary / TILE)] is scratch memory.
    Order: temperature, min-p, top-k, top-p. Samples the first token whose cumulative probability exceeds the
    uniform number.
    """
    rows, vocabulary = logits.shape
    count, columns = triton.cdiv(vocabulary, TILE), table.columns
    sizes = {"VOCABULARY": vocabulary, "TILES": count, "TILE": TILE, "num_warps": WARPS}
    tile_sums_kernel[rows, count](tiles, logits, slots, ends, columns["temperature"], **sizes)
    sample_kernel[(rows,)](
        tokens,
        tiles,
        logits,
        slots,
        ends,
        columns["temperature"],
        columns["top_p"],
        columns["min_p"],
        columns["top_k"],
        columns["key"],
        **sizes,
        PADDED=triton.next_power_of_2(count),
    )
