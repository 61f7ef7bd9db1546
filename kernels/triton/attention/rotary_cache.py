"""Rotates queries and keys and writes keys and values to their blocks, in one pass.

Source: Su et al., 2021. The pass includes RMSNorm of each head before the rotation (Qwen3).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit


@jit
def rotated(  # type: ignore[no-untyped-def]
    source: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    weight: tl.tensor,
    partner: tl.tensor,
    dims: tl.tensor,
    sign: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    epsilon: tl.tensor,
    HEAD_SIZE: tl.constexpr,
):
    """Returns the heads [H, D] at `source + offsets` in float32, normed if there is a weight, and rotated.

    Each feature's partner in the rotation is read from memory again. This hits the cache and avoids an exchange between
    threads for any pairing of features.
    """
    own = tl.load(source + offsets + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + offsets + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(own * own, 1) / HEAD_SIZE + epsilon)[:, None]
        real = dims < HEAD_SIZE
        own *= scale * tl.load(weight + dims, mask=real, other=0.0).to(tl.float32)[None, :]
        other *= scale * tl.load(weight + partner, mask=real, other=0.0).to(tl.float32)[None, :]
    return own * cos[None, :] + other * (sin * sign)[None, :]


@jit
def stored(x: tl.tensor, TYPE: tl.constexpr, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns `x` as stored in the cache: for fp8 clamped to the largest finite value."""
    if LARGEST > 0:
        x = tl.clamp(x, -LARGEST, LARGEST)
    return x.to(TYPE)


@jit
def rotary_cache_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    packed: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    table: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    epsilon: tl.float32,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    LANES: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: one token's KV head and the query heads that share it."""
    wait_for_previous(PDL)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, PADDED)
    real = dims < HEAD_SIZE
    turned = dims < ROTARY
    partner = tl.where(turned, tl.where(dims < HALF, dims + HALF, dims - HALF), dims)
    angle = tl.where(dims < HALF, dims, dims - HALF)
    sign = tl.where(dims < HALF, -1.0, 1.0)
    if ROTARY > 0:
        row = table + tl.load(positions + token).to(tl.int64) * ROTARY
        cos = tl.load(row + angle, mask=turned, other=1.0)
        sin = tl.load(row + HALF + angle, mask=turned, other=0.0)
    else:
        cos = tl.where(turned, 0.0, 1.0)
        sin = tl.where(turned, 1.0, 0.0)

    line = token * ((HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    lanes = tl.arange(0, LANES)
    heads = ((kv_head * GROUP + lanes) * HEAD_SIZE)[:, None]
    mask = (lanes < GROUP)[:, None] & real[None, :]
    q = rotated(packed + line, heads, mask, query_weight, partner, dims, sign, cos, sin, epsilon, HEAD_SIZE)
    goal = query + token * (HEADS * HEAD_SIZE)
    tl.store(goal + heads + dims[None, :], q.to(query.dtype.element_ty), mask=mask)

    one = tl.arange(0, 1)[:, None]
    own = packed + line + (HEADS + kv_head) * HEAD_SIZE
    k = rotated(own, one, real[None, :], key_weight, partner, dims, sign, cos, sin, epsilon, HEAD_SIZE)
    v = tl.load(own + KV_HEADS * HEAD_SIZE + dims, mask=real, other=0.0).to(tl.float32)
    place = tl.load(places + token)
    entry = ((place // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE) * HEAD_SIZE
    k = stored(k, key_cache.dtype.element_ty, LARGEST)
    tl.store(key_cache + entry + one + dims[None, :], k, mask=real[None, :])
    tl.store(value_cache + entry + dims, stored(v, value_cache.dtype.element_ty, LARGEST), mask=real)


@dataclass(frozen=True, slots=True)
class Rotary:
    """The constants of a layer's rotation."""

    heads: int
    kv_heads: int
    head_size: int
    rotary: int
    """Number of leading features of a head that are rotated; 0: none, keys are stored unchanged. Features i and
    i + rotary / 2 form a pair."""
    epsilon: float = 1e-6
    """Epsilon of the norms of heads."""


def rotary_cache(
    layer: Rotary,
    packed: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    table: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
) -> None:
    """Writes rotated queries to `query` [T, heads, head_size] and rotated keys and the values to the caches.

    `packed` [T, (heads + 2 * kv_heads) * head_size] has queries, keys and values; `positions` is int32 [T]; `places`
    int64 [T] is block * block_size + offset, in the dummy block for a dead row; `table` is float32 [positions, rotary],
    cosines before sines. Caches are [blocks, kv_heads, block_size, head_size], of the dtype of `packed` or
    float8_e4m3fn. The weights [head_size] norm each head of queries and keys before the rotation.
    """
    group = layer.heads // layer.kv_heads
    fp8 = key_cache.dtype == torch.float8_e4m3fn
    rotary_cache_kernel[len(packed), layer.kv_heads](
        query,
        key_cache,
        value_cache,
        packed,
        positions,
        places,
        table,
        query_weight,
        key_weight,
        layer.epsilon,
        KV_HEADS=layer.kv_heads,
        GROUP=group,
        HEAD_SIZE=layer.head_size,
        ROTARY=layer.rotary,
        BLOCK_SIZE=key_cache.shape[2],
        LARGEST=torch.finfo(torch.float8_e4m3fn).max if fp8 else 0.0,
        LANES=triton.next_power_of_2(group),
        PADDED=triton.next_power_of_2(layer.head_size),
        num_warps=warps(group),
        **launch_options(),
    )


def warps(group: int) -> int:
    """Returns the warps for the query heads of one KV head."""
    return int(min(8, triton.next_power_of_2(group)))
