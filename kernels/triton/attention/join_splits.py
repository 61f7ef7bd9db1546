"""Joins the partial results of a context that several programs shared."""

import triton
import triton.language as tl

from pagewire.kernels.triton.jit import jit

NUMBERS = 8192
"""Numbers of partial results that a program reads at a time, unless the heads of one split are more."""
MOST_SPLITS = 16
"""Splits that a program reads at a time, at most."""


@jit
def join_splits(  # type: ignore[no-untyped-def]
    out: tl.tensor,
    partial: tl.tensor,
    logsum: tl.tensor,
    first_item: tl.tensor,
    splits: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    most: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the average of the splits of each query, weighted by their sums of weights, for the heads of one KV head.

    `partial` is float32 [items, most, heads, SIZE], `logsum` float32 [items, most, heads], in base 2 and minus
    infinity where a split saw nothing. The splits are items from `first_item` on; the queries [begin, end) are tokens
    of `out` [T, heads, SIZE] from `first` + `begin` on.
    """
    member = tl.arange(0, triton.next_power_of_2(GROUP))
    dims = tl.arange(0, PADDED)
    head = kv_head * GROUP + member
    heads = KV_HEADS * GROUP
    real = (member < GROUP)[:, None] & (dims < SIZE)[None, :]
    for local in tl.range(begin, end):
        accumulator = tl.zeros([member.shape[0], PADDED], dtype=tl.float32)
        maximum = tl.full([member.shape[0]], float("-inf"), dtype=tl.float32)
        total = tl.zeros([member.shape[0]], dtype=tl.float32)
        for start in tl.range(0, splits, TILE):
            split = start + tl.arange(0, TILE)
            lanes = ((first_item + split).to(tl.int64) * most + local)[:, None] * heads + head[None, :]
            there = (split < splits)[:, None] & (member < GROUP)[None, :]
            # Other multiprocessors have written them: the first-level cache may have what was there before.
            sums = tl.load(logsum + lanes, mask=there, other=float("-inf"), cache_modifier=".cg")
            larger = tl.maximum(maximum, tl.max(sums, 0))
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp2(sums - base[None, :])
            shrink = tl.exp2(maximum - base)
            places = partial + lanes[:, :, None] * SIZE + dims[None, None, :]
            known = there[:, :, None] & (dims < SIZE)[None, None, :]
            values = tl.load(places, mask=known, other=0.0, cache_modifier=".cg")
            accumulator = accumulator * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
            total = total * shrink + tl.sum(weights, 0)
            maximum = larger
        result = accumulator / tl.where(total > 0, total, 1.0)[:, None]
        place = ((first + local).to(tl.int64) * heads + head) * SIZE
        tl.store(out + place[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=real)


def splits_at_a_time(group: int, size: int) -> int:
    """Returns how many splits a program reads at a time, for `group` heads of `size` numbers."""
    return int(min(MOST_SPLITS, max(1, NUMBERS // (triton.next_power_of_2(size) * triton.next_power_of_2(group)))))
