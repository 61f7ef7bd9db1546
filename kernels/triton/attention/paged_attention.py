"""Attention over a paged KV cache for a mixed ragged batch: prompt chunks, decodes and verify tokens in one launch.

Source: the unified kernel of vLLM (`triton_unified_attention`) for the packing of grouped heads and the grid bound.
"""

import torch
import triton
import triton.language as tl

from pagewire.kernels.attention_layer import Attention, Batch
from pagewire.kernels.gpu_arch import current, is_wide, known_options
from pagewire.kernels.triton.attention.attend import add_sink, attend
from pagewire.kernels.triton.attention.find_row import find_row
from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit


@jit
def paged_attention_kernel(
    out: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    cu_queries: tl.tensor,
    sinks: tl.tensor,
    table_width: tl.int32,
    rows: tl.int32,
    scale: tl.float32,
    minimum: tl.int32,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: BLOCK_M // GROUP queries of one sequence, all heads that share one KV head."""
    wait_for_previous(PDL)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last queries take longest and begin first
    kv_head = tl.program_id(1)
    row = find_row(cu_queries, index, rows, BLOCK_Q, 1)
    first = tl.load(cu_queries + row)
    queries = tl.load(cu_queries + row + 1) - first
    offset = (index - first // BLOCK_Q - row) * BLOCK_Q
    if offset >= queries or queries < minimum:
        return
    length = tl.load(lengths + row)
    slot = tl.load(slots + row).to(tl.int64)

    lanes = tl.arange(0, BLOCK_M)
    local = offset + lanes // GROUP
    head = kv_head * GROUP + lanes % GROUP
    live = (lanes < BLOCK_Q * GROUP) & (local < queries)
    positions = tl.where(live & (length > 0), length - queries + local, -1)
    dims = tl.arange(0, PADDED)
    lane = (first + local).to(tl.int64) * (KV_HEADS * GROUP) + head
    real = live[:, None] & (dims < HEAD_SIZE)[None, :]
    q = tl.load(query + lane[:, None] * HEAD_SIZE + dims[None, :], mask=real, other=0.0)

    position = length - queries + offset
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    if CHUNK > 0:
        begin = tl.maximum(position, 0) // CHUNK * CHUNK // TILE * TILE
    accumulator, maximum, total = attend(
        q,
        positions,
        kv_head,
        begin,
        position,
        tl.minimum(position + BLOCK_Q, length),
        key_cache,
        value_cache,
        block_tables + slot * table_width,
        scale,
        KV_HEADS,
        HEAD_SIZE,
        VALUE_SIZE,
        VALUE_PADDED,
        BLOCK_SIZE,
        TILE,
        WINDOW,
        CHUNK,
        SOFT_CAP,
    )
    if sinks is not None:
        accumulator, _, total = add_sink(accumulator, maximum, total, tl.load(sinks + head, mask=live, other=0.0))
    result = accumulator * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    value_dims = tl.arange(0, VALUE_PADDED)
    real = live[:, None] & (value_dims < VALUE_SIZE)[None, :]
    tl.store(out + lane[:, None] * VALUE_SIZE + value_dims[None, :], result.to(out.dtype.element_ty), mask=real)


def tiling(layer: Attention, itemsize: int, *, wide: bool) -> dict[str, int]:
    """Returns tile sizes, warps, pipeline depth and registers of the mixed kernel, for elements of `itemsize` bytes.

    `wide`: see `pagewire.kernels.gpu_arch.is_wide`.
    """
    padded = triton.next_power_of_2(layer.head_size)
    if itemsize == 4:  # IEEE products on the ordinary cores: small tiles, or the accumulators spill
        block_m, tile, warps, stages = 16, 16, 4, 2
    elif padded > 128:
        block_m, tile, warps, stages = 64, 32, 8, 5 if wide else 3
    elif wide:
        block_m, tile, warps, stages = 128, 64, 8, 5 if padded > 64 else 3
    elif 64 < layer.head_size < padded:  # masks take registers
        block_m, tile, warps, stages = 64, 32, 4, 4
    else:
        block_m, tile, warps, stages = 128, 32, 8, 4
    block_m = max(block_m, triton.next_power_of_2(layer.group))
    launch = {"num_warps": warps, "num_stages": stages}
    if padded <= 64:  # by default the assembler targets 128 for them on sm_100 and spills
        launch["maxnreg"] = 168
    return {"BLOCK_M": block_m, "TILE": tile, "PADDED": padded, **launch}


def paged_attention(
    layer: Attention,
    batch: Batch,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    minimum: int = 1,
    sinks: torch.Tensor | None = None,
) -> None:
    """Writes causal attention of `query` [T, heads, head_size] over the cache to `out`, of the same dtype.

    The queries of a sequence are its last positions, whose keys and values are already in the cache. Caches are
    [blocks, kv_heads, block_size, head_size], of the query's dtype or float8_e4m3fn; that of values and `out` have
    `layer.value_head_size` instead. `sinks` each head's score of a key without
    value, float32 [heads]. Sequences with fewer than `minimum` queries are skipped, for `split_attention`. Tokens from
    `cu_queries[-1]` on are not written.
    """
    sizes = known_options(tiling(layer, query.element_size(), wide=is_wide(current())))
    rows = len(batch.slots)
    grid = (len(query) // (sizes["BLOCK_M"] // layer.group) + rows, layer.kv_heads)
    paged_attention_kernel[grid](
        out,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.slots,
        batch.lengths,
        batch.cu_queries,
        sinks,
        batch.block_tables.stride(0),
        rows,
        layer.scale,
        minimum,
        KV_HEADS=layer.kv_heads,
        GROUP=layer.group,
        HEAD_SIZE=layer.head_size,
        VALUE_SIZE=layer.value_head_size,
        VALUE_PADDED=triton.next_power_of_2(layer.value_head_size),
        BLOCK_SIZE=key_cache.shape[2],
        WINDOW=layer.window,
        CHUNK=layer.chunk,
        SOFT_CAP=layer.soft_cap,
        **sizes,
        **launch_options(),
    )
