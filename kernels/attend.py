"""The inner loop of all attention kernels: one packed tile of queries against a range of cached positions.

Source: FlashAttention-2 (Dao, 2023) for the online softmax; vLLM's paged layout (Kwon et al., 2023) for the cache.
"""

import triton.language as tl

from pagewire.kernels.jit import jit

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
MINUS_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))


@jit
def soft_cap(scores: tl.tensor, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns `CAP * tanh(scores / CAP)`, with one exponential, whose overflow is harmless."""
    return CAP - 2 * CAP / (tl.exp2(scores * (2 * LOG2E / CAP)) + 1)


@jit
def attend(  # type: ignore[no-untyped-def]
    q: tl.tensor,
    positions: tl.tensor,
    slopes: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Computes unnormalised attention of `q` [M, D] over cached positions [begin, end), `begin` a multiple of TILE.

    Row m sees position j if j <= positions[m] and, with a window, positions[m] - j < WINDOW, or, with chunks, j is in
    the chunk of positions[m]; a row with position -1 sees nothing. Returns (sum of weighted values [M, VALUE_PADDED],
    largest score [M], sum of weights [M]) in float32, with scores in base 2.
    """
    M: tl.constexpr = q.shape[0]
    D: tl.constexpr = q.shape[1]
    dims = tl.arange(0, D)
    value_dims = tl.arange(0, VALUE_PADDED)
    accumulator = tl.zeros([M, VALUE_PADDED], dtype=tl.float32)
    maximum = tl.full([M], MINUS_INFINITY, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    # What no row sees is not read: its block may be another sequence's, and 0 times a NaN there would be NaN.
    lowest = tl.min(tl.where(positions >= 0, positions, end), 0)
    first = begin
    if WINDOW > 0:
        first = lowest - WINDOW + 1
    if CHUNK > 0:
        first = lowest // CHUNK * CHUNK
    for start in tl.range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        cached = keys < end
        if WINDOW > 0 or CHUNK > 0:
            cached = cached & (keys >= first)
        blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=cached, other=0).to(tl.int64)
        rows = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        real = cached[:, None]
        if D != HEAD_SIZE:
            real = real & (dims < HEAD_SIZE)[None, :]
        k = tl.load(key_cache + rows[:, None] * HEAD_SIZE + dims[None, :], mask=real, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFT_CAP > 0:
            scores = soft_cap(scores, SOFT_CAP)
        distance = positions[:, None] - keys[None, :]
        if ALIBI:
            scores -= slopes[:, None] * distance
        visible = distance >= 0
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        if CHUNK > 0:
            visible = visible & (keys[None, :] >= (positions // CHUNK * CHUNK)[:, None])
        scores = tl.where(visible, scores * LOG2E, MINUS_INFINITY)
        larger = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(larger == MINUS_INFINITY, 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        real = cached[:, None]
        if VALUE_PADDED != VALUE_SIZE:
            real = real & (value_dims < VALUE_SIZE)[None, :]
        v = tl.load(value_cache + rows[:, None] * VALUE_SIZE + value_dims[None, :], mask=real, other=0.0).to(q.dtype)
        accumulator = tl.dot(weights.to(q.dtype), v, accumulator * shrink[:, None], input_precision="ieee")
        maximum = larger
    return accumulator, maximum, total


@jit
def add_sink(accumulator, maximum, total, sink):  # type: ignore[no-untyped-def]
    """Returns the result of `attend` with one more key [M], whose value is zero, of the natural score `sink` [M]."""
    score = sink * LOG2E
    larger = tl.maximum(maximum, score)
    base = tl.where(larger == MINUS_INFINITY, 0.0, larger)
    shrink = tl.exp2(maximum - base)
    return accumulator * shrink[:, None], larger, total * shrink + tl.exp2(score - base)
