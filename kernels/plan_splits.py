"""How many programs share the context of each decoding sequence, decided on the device once per step.

Reading the KV cache is a decode's work, and a part has only so many programs at once: long contexts are cut so that
all programs end together, at any batch size. Nothing here depends on the host knowing a length, so a CUDA graph can
hold it. The idea of planning by work items follows FlashInfer (Ye et al., 2025).
"""

import torch
import triton
import triton.language as tl

from pagewire.kernels.jit import Configuration, jit

CANDIDATES: tl.constexpr = tl.constexpr(32)


def capacity(multiprocessors: int, kv_heads: int) -> int:
    """Programs per KV head that a part runs at once; two fit on a multiprocessor."""
    return max(1, 2 * multiprocessors // kv_heads)


def most_items(rows: int, capacity: int) -> int:
    """Most work items per KV head that a plan can have: the size of grids and of the partial results."""
    return rows + 4 * capacity


def split_tiles(tiles: list[int], capacity: int) -> int:
    """Tiles per work item that end a step soonest, given the tiles of each sequence's context.

    Considers items from the smallest that `most_items` allows upwards. A choice costs its waves of `capacity` items
    times the length of an item, plus one tile for an item's start and its share of the reduction.
    """
    smallest = max(1, -(-sum(tiles) // (4 * capacity)))
    step = max(1, smallest // 8)

    def cost(size: int) -> int:
        items = sum(-(-count // size) for count in tiles)
        return -(-items // capacity) * (min(size, max(tiles, default=1)) + 1)

    return min((smallest + candidate * step for candidate in range(int(CANDIDATES.value))), key=cost)


@jit
def plan_splits_kernel(
    cu_splits: tl.tensor,
    split_size: tl.tensor,
    lengths: tl.tensor,
    cu_queries: tl.tensor,
    rows: tl.int32,
    capacity: tl.int32,
    LIMIT: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program plans the whole batch."""
    row = tl.arange(0, ROWS)
    mask = row < rows
    length = tl.load(lengths + row, mask=mask, other=0)
    queries = tl.load(cu_queries + row + 1, mask=mask, other=0) - tl.load(cu_queries + row, mask=mask, other=0)
    begin = row * 0
    if WINDOW > 0:
        begin = tl.maximum(length - queries - WINDOW + 1, 0) // TILE * TILE
    short = (queries > 0) & (queries <= LIMIT)
    tiles = tl.where(short, tl.maximum((length - begin + TILE - 1) // TILE, 1), 0)
    longest = tl.maximum(tl.max(tiles, 0), 1)
    smallest = tl.maximum((tl.sum(tiles, 0) + 4 * capacity - 1) // (4 * capacity), 1)
    step = tl.maximum(smallest // 8, 1)

    best = smallest
    least = smallest * 0 + 0x7FFFFFFF
    for candidate in range(CANDIDATES):
        size = smallest + candidate * step
        items = tl.sum((tiles + size - 1) // size, 0)
        cost = (items + capacity - 1) // capacity * (tl.minimum(size, longest) + 1)
        best = tl.where(cost < least, size, best)
        least = tl.minimum(cost, least)

    splits = (tiles + best - 1) // best
    tl.store(split_size, best)
    tl.store(cu_splits, 0)
    tl.store(cu_splits + 1 + row, tl.cumsum(splits, 0), mask=mask)


def plan_splits(
    lengths: torch.Tensor,
    cu_queries: torch.Tensor,
    capacity: int,
    limit: int,
    tile: int,
    window: int,
    cu_splits: torch.Tensor,
    split_size: torch.Tensor,
) -> None:
    """Cuts the contexts of sequences with 1 to `limit` queries into items of `split_size` tiles of `tile` positions.

    All tensors int32: `lengths` [R] in positions, `cu_queries` [R + 1]. Written: `cu_splits` [R + 1], where the items
    of each row begin, and `split_size` [1] in tiles. A row with too many queries, or none, has no item.
    """
    rows = len(lengths)
    plan_splits_kernel[(1,)](
        cu_splits,
        split_size,
        lengths,
        cu_queries,
        rows,
        capacity,
        LIMIT=limit,
        TILE=tile,
        WINDOW=window,
        ROWS=triton.next_power_of_2(rows),
    )


def reference(
    lengths: torch.Tensor, cu_queries: torch.Tensor, capacity: int, limit: int, tile: int, window: int
) -> tuple[torch.Tensor, int]:
    """`cu_splits` and `split_size` of `plan_splits`."""
    tiles = []
    for length, queries in zip(lengths.tolist(), cu_queries.diff().tolist(), strict=True):
        begin = max(length - queries - window + 1, 0) // tile * tile if window else 0
        tiles.append(max(1, -(-(length - begin) // tile)) if 0 < queries <= limit else 0)
    size = split_tiles(tiles, capacity)
    splits = torch.tensor([0] + [-(-count // size) for count in tiles])
    return splits.cumsum(0).int(), size


def configurations() -> list[Configuration]:
    """Forms that a device launches, for `pagewire.kernels.compile`."""
    return [
        Configuration(
            name=f"{rows} rows{', window' if window else ''}",
            kernel=plan_splits_kernel,
            tensors=dict.fromkeys(("cu_splits", "split_size", "lengths", "cu_queries"), "i32"),
            constants={"LIMIT": 4, "TILE": 64, "WINDOW": window, "ROWS": rows},
            spills=False,
        )
        for rows, window in ((1, 0), (64, 0), (256, 0), (1024, 4096))
    ]
