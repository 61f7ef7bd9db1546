"""Shares the inputs of a matrix product among programs, whose sums the last one of them adds up.

With few rows a product has few tiles, fewer than a GPU has multiprocessors. The programs of a tile count themselves,
and the last one adds all sums in the order of the inputs, so the result does not depend on which one that is.
"""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.jit import jit

OUTPUTS = 28672
"""Outputs times splits of a product, at least, where its inputs can be split: so many keep an H200's memory busy."""
SUMS = 256
"""Rows of a tile times its splits, at most: the last program adds up so many sums for each output."""
MOST_SPLITS = 8
"""Programs that share a tile, at most."""
FEWEST_STEPS = 4
"""Steps of a program's loop, at least: with fewer, its first loads take longer than the rest."""
NARROWEST = 32
"""Outputs of the narrowest tile."""


def splits_of(rows: int, block_m: int, outputs: int, steps: int) -> int:
    """Returns how many programs share the inputs of each tile of a product: a divisor of `steps`, those of its loop.

    A tile has `block_m` rows. With more rows the inputs are not shared: several tiles are programs enough.

    >>> splits_of(1, 16, 28672, 16), splits_of(1, 16, 4096, 56), splits_of(64, 64, 4096, 56)
    (1, 8, 4)
    """
    if rows > block_m:
        return 1
    splits, most = 1, min(MOST_SPLITS, SUMS // block_m, steps // FEWEST_STEPS)
    while outputs * splits < OUTPUTS and 2 * splits <= most and steps % (2 * splits) == 0:
        splits *= 2
    return splits


def counters_of(outputs: int, device: torch.device) -> torch.Tensor:
    """Returns a counter for each tile of a product that is shared, int32, zero before and after each product."""
    return torch.zeros(triton.cdiv(outputs, NARROWEST), dtype=torch.int32, device=device)


@jit
def store_split(total: tl.tensor, partial: tl.tensor, tile: tl.tensor, split: tl.tensor, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the sums `total` [A, B] of one split of a tile to `partial`."""
    A: tl.constexpr = total.shape[0]
    B: tl.constexpr = total.shape[1]
    place = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(partial + (tile.to(tl.int64) * SPLITS + split) * (A * B) + place, total)


@jit
def sum_of_splits(total: tl.tensor, partial: tl.tensor, tile: tl.tensor, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the sum of all splits of a tile, of the shape of `total`, in their order."""
    A: tl.constexpr = total.shape[0]
    B: tl.constexpr = total.shape[1]
    place = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    total = tl.zeros((A, B), tl.float32)
    for split in range(SPLITS):
        # Not from the first-level cache, which is not told of what other multiprocessors write.
        total += tl.load(partial + (tile.to(tl.int64) * SPLITS + split) * (A * B) + place, cache_modifier=".cg")
    return total
