"""Shares the inputs of a matrix product among programs, whose sums the last one of them adds up.

With few rows a product has few tiles, fewer than a GPU has multiprocessors. The programs of a tile count themselves,
and the last one adds all sums in the order of the inputs, so the result does not depend on which one that is.
"""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.jit import jit

PROGRAMS = 384
"""Programs of a product, at least, where its inputs can be shared: three for each multiprocessor of a large GPU."""
MOST_SPLITS = 8
"""Programs that share a tile, at most: the last one reads the sums of all."""
FEWEST_STEPS = 4
"""Steps of a program's loop, at least: with fewer, its first loads take longer than the rest."""
SMALLEST_TILE = 32
"""Outputs of the narrowest tile of a product that is shared."""


def splits_of(tiles: int, steps: int) -> int:
    """Returns how many programs share each of `tiles` tiles of a product of `steps` steps; a divisor of `steps`."""
    splits = 1
    while (
        splits < MOST_SPLITS
        and tiles * splits < PROGRAMS
        and steps % (2 * splits) == 0
        and steps >= 2 * splits * FEWEST_STEPS
    ):
        splits *= 2
    return splits


def counters_of(outputs: int, device: torch.device) -> torch.Tensor:
    """Returns a counter for each tile of a product with one tile of rows, int32, zero before and after each product."""
    return torch.zeros(PROGRAMS + triton.cdiv(outputs, SMALLEST_TILE), dtype=torch.int32, device=device)


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
