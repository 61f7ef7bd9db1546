"""Decides how many programs share the context of each decoding sequence, on the device, once per step.

The time of a decode is the time to read the KV cache, and a GPU runs a limited number of programs at once. So long
contexts are split such that all programs end at about the same time, at any batch size. The host needs no lengths, so
the kernel can be captured in a CUDA graph. Planning by work items follows FlashInfer (Ye et al., 2025).
"""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.jit import jit

CANDIDATES: tl.constexpr = tl.constexpr(32)
FEWEST = 64
"""Rows of the smallest form of the kernel: fewer forms, and fewer rows take as long."""


def capacity(multiprocessors: int, kv_heads: int) -> int:
    """Returns the programs per KV head that a GPU runs at once; two fit on a multiprocessor."""
    return max(1, 2 * multiprocessors // kv_heads)


def most_items(rows: int, capacity: int) -> int:
    """Returns the maximum work items per KV head of a plan, which is the size of grids and of partial results."""
    return rows + 4 * capacity


@jit
def plan_splits_kernel(
    item_rows: tl.tensor,
    cu_splits: tl.tensor,
    split_size: tl.tensor,
    lengths: tl.tensor,
    cu_queries: tl.tensor,
    items: tl.int32,
    rows: tl.int32,
    capacity: tl.int32,
    width: tl.int32,
    limit: tl.int32,
    tile: tl.int32,
    window: tl.int32,
    ROWS: tl.constexpr,
) -> None:
    """One program plans the whole batch."""
    row = tl.arange(0, ROWS)
    mask = row < rows
    for start in range(0, items, ROWS):
        tl.store(item_rows + start + row, -1, mask=start + row < items)
    length = tl.load(lengths + row, mask=mask, other=0)
    queries = tl.load(cu_queries + row + 1, mask=mask, other=0) - tl.load(cu_queries + row, mask=mask, other=0)
    begin = tl.where(window > 0, tl.maximum(length - queries - window + 1, 0) // tile * tile, 0)
    short = (queries > 0) & (queries <= limit)
    tiles = tl.where(short, tl.maximum((length - begin + tile - 1) // tile, 1), 0)
    programs = (queries + width - 1) // width  # of each split
    longest = tl.maximum(tl.max(tiles, 0), 1)
    smallest = tl.maximum((tl.sum(tiles * programs, 0) + 4 * capacity - 1) // (4 * capacity), 1)
    step = tl.maximum(smallest // 8, 1)

    best = smallest
    least = smallest * 0 + 0x7FFFFFFF
    for candidate in range(CANDIDATES):
        size = smallest + candidate * step
        count = tl.sum((tiles + size - 1) // size * programs, 0)
        cost = (count + capacity - 1) // capacity * (tl.minimum(size, longest) + 1)
        best = tl.where(cost < least, size, best)
        least = tl.minimum(cost, least)

    splits = (tiles + best - 1) // best
    tl.store(split_size, best)
    tl.store(cu_splits, 0)
    ends = tl.cumsum(splits, 0)
    tl.store(cu_splits + 1 + row, ends, mask=mask)
    tl.debug_barrier()  # other threads have written -1 to the same items
    for split in range(tl.max(splits, 0)):
        tl.store(item_rows + ends - splits + split, row, mask=split < splits)


def plan_splits(
    lengths: torch.Tensor,
    cu_queries: torch.Tensor,
    capacity: int,
    limits: tuple[int, int],
    tile: int,
    window: int,
    item_rows: torch.Tensor,
    cu_splits: torch.Tensor,
    split_size: torch.Tensor,
) -> None:
    """Splits the contexts of sequences with few queries into items of `split_size` tiles of `tile` positions.

    `limits` are the queries of a program and those of a row, at most.
    All tensors are int32. Reads `lengths` [R], in positions, and `cu_queries` [R + 1]. Writes `item_rows`
    [`most_items`], the row of each item and -1 behind the last one, `cu_splits` [R + 1], the index of each row's first
    item, and `split_size` [1], in tiles. A row with no queries or too many has no items.
    """
    rows = len(lengths)
    plan_splits_kernel[(1,)](
        item_rows,
        cu_splits,
        split_size,
        lengths,
        cu_queries,
        len(item_rows),
        rows,
        capacity,
        *limits,
        tile,
        window,
        ROWS=max(FEWEST, triton.next_power_of_2(rows)),
    )
