"""The plan of split contexts in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.attention.plan_splits import CANDIDATES


def split_tiles(tiles: list[int], capacity: int, programs: list[int] | None = None) -> int:
    """Returns the tiles per work item that minimise the time of a step, given the tiles of each sequence's context.

    `programs` compute each item of a sequence; None: one each. Tries item sizes from the smallest that `most_items`
    allows upwards. The cost of a size is the number of waves of `capacity` programs times the length of an item, plus
    one tile per item for its start and its part of the reduction.
    """
    programs = programs or [1] * len(tiles)
    smallest = max(1, -(-sum(count * each for count, each in zip(tiles, programs, strict=True)) // (4 * capacity)))
    step = max(1, smallest // 8)

    def cost(size: int) -> int:
        items = sum(-(-count // size) * each for count, each in zip(tiles, programs, strict=True))
        return -(-items // capacity) * (min(size, max(tiles, default=1)) + 1)

    return min((smallest + candidate * step for candidate in range(int(CANDIDATES.value))), key=cost)


def reference(
    lengths: torch.Tensor, cu_queries: torch.Tensor, capacity: int, limits: tuple[int, int], tile: int, window: int
) -> tuple[torch.Tensor, int]:
    """Returns `cu_splits` and `split_size` of `plan_splits`."""
    width, limit = limits
    tiles, programs = [], []
    for length, queries in zip(lengths.tolist(), cu_queries.diff().tolist(), strict=True):
        begin = max(length - queries - window + 1, 0) // tile * tile if window else 0
        tiles.append(max(1, -(-(length - begin) // tile)) if 0 < queries <= limit else 0)
        programs.append(-(-queries // width))
    size = split_tiles(tiles, capacity, programs)
    splits = torch.tensor([0] + [-(-count // size) for count in tiles])
    return splits.cumsum(0).int(), size
