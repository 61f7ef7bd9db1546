"""The inner loop of all attention kernels: one packed tile of queries against a range of cached positions.

Source: FlashAttention-2 (Dao, 2023) for the online softmax; vLLM's paged layout (Kwon et al., 2023) for the cache.
"""

import triton.language as tl

from pagewire.kernels.triton.jit import jit

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
MINUS_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))


@jit
def soft_cap(scores: tl.tensor, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns `CAP * tanh(scores / CAP)`, with one exponential, whose overflow is harmless."""
    return CAP - 2 * CAP / (tl.exp2(scores * (2 * LOG2E / CAP)) + 1)


@jit
def visible(positions: tl.tensor, keys: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns which of the positions `keys` [TILE] each row sees, bool [M, TILE]; see `attend`."""
    distance = positions[:, None] - keys[None, :]
    seen = distance >= 0
    if WINDOW > 0:
        seen = seen & (distance < WINDOW)
    if CHUNK > 0:
        seen = seen & (keys[None, :] >= (positions // CHUNK * CHUNK)[:, None])
    return seen


@jit
def attend_tiles(  # type: ignore[no-untyped-def]
    accumulator: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    positions: tl.tensor,
    begin: tl.tensor,
    least: tl.tensor,
    end: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the positions [begin, end) to the sums of `attend`. Unless MASKED, these are whole tiles that all rows see.

    What lies before `least` is seen by no row, and not read. The caches begin at the KV head.

    The scale is part of the exponent: a number of a tile costs one multiply-add, one exponential, one maximum and one
    sum beside the products.
    """
    D: tl.constexpr = q.shape[1]
    VALUE_PADDED: tl.constexpr = accumulator.shape[1]
    dims = tl.arange(0, D)
    value_dims = tl.arange(0, VALUE_PADDED)
    exponent = scale * LOG2E
    if SOFT_CAP > 0:
        exponent = LOG2E
    for start in tl.range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        real = (keys >= 0)[:, None]
        if MASKED:
            cached = keys < end
            if WINDOW > 0 or CHUNK > 0:
                cached = cached & (keys >= least)
            real = cached[:, None]
            blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=cached, other=0).to(tl.int64)
        else:
            blocks = tl.load(block_table + keys // BLOCK_SIZE).to(tl.int64)
        rows = blocks * KV_HEADS * BLOCK_SIZE + keys % BLOCK_SIZE
        k_places = key_cache + rows[:, None] * HEAD_SIZE + dims[None, :]
        if D != HEAD_SIZE:
            k = tl.load(k_places, mask=real & (dims < HEAD_SIZE)[None, :], other=0.0).to(q.dtype)
        elif MASKED:
            k = tl.load(k_places, mask=real, other=0.0).to(q.dtype)
        else:
            k = tl.load(k_places).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFT_CAP > 0:
            scores = soft_cap(scores * scale, SOFT_CAP)
        if MASKED:
            scores = tl.where(visible(positions, keys, WINDOW, CHUNK), scores, MINUS_INFINITY)
        larger = tl.maximum(maximum, tl.max(scores, 1) * exponent)
        base = larger
        if MASKED:
            base = tl.where(larger == MINUS_INFINITY, 0.0, larger)
        weights = tl.exp2(scores * exponent - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        v_places = value_cache + rows[:, None] * VALUE_SIZE + value_dims[None, :]
        if VALUE_PADDED != VALUE_SIZE:
            v = tl.load(v_places, mask=real & (value_dims < VALUE_SIZE)[None, :], other=0.0).to(q.dtype)
        elif MASKED:
            v = tl.load(v_places, mask=real, other=0.0).to(q.dtype)
        else:
            v = tl.load(v_places).to(q.dtype)
        accumulator = tl.dot(weights.to(q.dtype), v, accumulator * shrink[:, None], input_precision="ieee")
        maximum = larger
    return accumulator, maximum, total


@jit
def attend(  # type: ignore[no-untyped-def]
    q: tl.tensor,
    positions: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,
    first: tl.tensor,
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
):
    """Computes unnormalised attention of `q` [M, D] over cached positions [begin, end), `begin` a multiple of TILE.

    Row m sees position j if j <= positions[m] and, with a window, positions[m] - j < WINDOW, or, with chunks, j is in
    the chunk of positions[m]; the sums of a row with position -1 are arbitrary. `first` is the smallest position of
    the other rows; `scale` is positive. Returns (sum of weighted values [M, VALUE_PADDED], largest score [M], sum of
    weights [M]) in float32, with scores in base 2.
    """
    accumulator = tl.zeros([q.shape[0], VALUE_PADDED], dtype=tl.float32)
    maximum = tl.full([q.shape[0]], MINUS_INFINITY, dtype=tl.float32)
    total = tl.zeros([q.shape[0]], dtype=tl.float32)
    key_cache += kv_head * BLOCK_SIZE * HEAD_SIZE
    value_cache += kv_head * BLOCK_SIZE * VALUE_SIZE
    if WINDOW == 0 and CHUNK == 0:
        hidden = begin + tl.maximum(tl.minimum(first + 1, end) - begin, 0) // TILE * TILE
        accumulator, maximum, total = attend_tiles(
            accumulator, maximum, total, q, positions, begin, begin, hidden, key_cache, value_cache,
            block_table, scale, KV_HEADS, HEAD_SIZE, VALUE_SIZE, BLOCK_SIZE, TILE, WINDOW, CHUNK, SOFT_CAP, False,
        )  # fmt: skip
        begin = hidden
    # What no row sees may be another sequence's by now, and 0 times a NaN there would be NaN.
    least = begin
    if WINDOW > 0:
        least = first - WINDOW + 1
    if CHUNK > 0:
        least = first // CHUNK * CHUNK
    return attend_tiles(
        accumulator, maximum, total, q, positions, begin, least, end, key_cache, value_cache,
        block_table, scale, KV_HEADS, HEAD_SIZE, VALUE_SIZE, BLOCK_SIZE, TILE, WINDOW, CHUNK, SOFT_CAP, True,
    )  # fmt: skip


@jit
def add_sink(accumulator, maximum, total, sink):  # type: ignore[no-untyped-def]
    """Returns the result of `attend` with one more key [M], whose value is zero, of the natural score `sink` [M]."""
    score = sink * LOG2E
    larger = tl.maximum(maximum, score)
    base = tl.where(larger == MINUS_INFINITY, 0.0, larger)
    shrink = tl.exp2(maximum - base)
    return accumulator * shrink[:, None], larger, total * shrink + tl.exp2(score - base)
