"""Attention of rows with few queries, such as decodes. Several programs share a context, as `plan_splits` has decided.

Source: Flash-Decoding (Dao et al., 2023).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire.kernels.attention_layer import Attention, Batch
from pagewire.kernels.gpu_arch import current, is_wide, known_options
from pagewire.kernels.triton.attention.attend import add_sink, attend
from pagewire.kernels.triton.attention.join_splits import join_splits, splits_at_a_time
from pagewire.kernels.triton.attention.plan_splits import most_items, plan_splits
from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit
from pagewire.kernels.triton.last_program import is_last_program


@jit
def split_attention_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    logsum: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    cu_queries: tl.tensor,
    item_rows: tl.tensor,
    cu_splits: tl.tensor,
    split_size: tl.tensor,
    counters: tl.tensor,
    sinks: tl.tensor,
    table_width: tl.int32,
    scale: tl.float32,
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
    JOINED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: BLOCK_M // GROUP queries of one sequence for one KV head, over one split of the context.

    The last program of these queries joins their splits, JOINED at a time.
    """
    wait_for_previous(PDL)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(item_rows + item)
    if row < 0:
        return
    first_item = tl.load(cu_splits + row)
    splits = tl.load(cu_splits + row + 1) - first_item
    first = tl.load(cu_queries + row)
    queries = tl.load(cu_queries + row + 1) - first
    part, parts = tl.program_id(2), tl.num_programs(2)
    offset = part * BLOCK_Q
    if offset >= queries:
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

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - queries - WINDOW + 1, 0) // TILE * TILE
    width = tl.load(split_size) * TILE
    begin += (item - first_item) * width
    accumulator, maximum, total = attend(
        q,
        positions,
        kv_head,
        begin,
        length - queries + offset,
        tl.minimum(begin + width, tl.minimum(length - queries + offset + BLOCK_Q, length)),
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
        sink = tl.load(sinks + head, mask=live, other=0.0)
        sink = tl.where(item == first_item, sink, float("-inf"))  # in one of the splits
        accumulator, maximum, total = add_sink(accumulator, maximum, total, sink)
    result = accumulator * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    value_dims = tl.arange(0, VALUE_PADDED)
    real = live[:, None] & (value_dims < VALUE_SIZE)[None, :]
    if splits == 1:
        tl.store(out + lane[:, None] * VALUE_SIZE + value_dims[None, :], result.to(out.dtype.element_ty), mask=real)
    else:
        lane = (item.to(tl.int64) * (parts * BLOCK_Q) + local) * (KV_HEADS * GROUP) + head
        tl.store(partial + lane[:, None] * VALUE_SIZE + value_dims[None, :], result, mask=real)
        logarithm = tl.where(total > 0, maximum + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(logsum + lane, logarithm, mask=live)
        if is_last_program(counters + (row * parts + part) * KV_HEADS + kv_head, splits):
            join_splits(
                out, partial, logsum, first_item, splits, first, offset, tl.minimum(offset + BLOCK_Q, queries),
                parts * BLOCK_Q, kv_head, KV_HEADS, GROUP, VALUE_SIZE, VALUE_PADDED, JOINED,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The result of `plan_splits`, and buffers for partial results. Layers with the same constants share a plan."""

    capacity: int
    """Result of `plan_splits.capacity`."""
    parts: int
    """Programs by which the queries of a row are computed, at most, each over the whole split."""
    sizes: Mapping[str, int]
    """Result of `tiling`."""
    item_rows: torch.Tensor
    """int32 [items] row of each work item; -1 behind the last one."""
    cu_splits: torch.Tensor
    """int32 [R + 1] index of each row's first work item."""
    split_size: torch.Tensor
    """int32 [1] tiles per item."""
    partial: torch.Tensor
    """float32 [items, queries, heads, value_head_size] result of each split."""
    logsum: torch.Tensor
    """float32 [items, queries, heads] base-2 logarithm of the sum of a split's weights."""
    counters: torch.Tensor
    """int32 [R, parts, kv_heads] programs of a part that have ended, while it runs; else 0."""


def tiling(layer: Attention, itemsize: int, cached: int, arch: int) -> dict[str, int]:
    """Returns tile sizes, warps, pipeline depth and registers of the kernel.

    `itemsize` and `cached` are the bytes of an element of the query and of the cache, `arch` is the GPU's compute
    capability times ten.
    """
    padded = triton.next_power_of_2(layer.head_size)
    if itemsize == 4:
        tile, stages = 16, 3
    elif padded > 128:
        tile, stages = 32, 5 if is_wide(arch) else 4
    elif arch // 10 == 9 and cached == 2:  # 4 to 10 % faster on an H200; others spill
        tile, stages = 128, 3
    else:
        tile, stages = 64, 5
    block_m = max(16, triton.next_power_of_2(layer.group))
    warps = 8 if block_m > 64 or itemsize == 4 else 4
    # By default the assembler targets fewer and spills; with 255 two programs run at a time on a multiprocessor.
    launch = {"num_warps": warps, "num_stages": stages, "maxnreg": 255 if tile == 128 else 224}
    return {"BLOCK_M": block_m, "TILE": tile, "PADDED": padded, **launch}


def most_queries(layer: Attention, parts: int = 1) -> int:
    """Returns the maximum number of queries of a row that the split kernel computes in so many parts."""
    return int(max(16, triton.next_power_of_2(layer.group))) // layer.group * parts


def new_plan(
    layer: Attention,
    rows: int,
    capacity: int,
    device: torch.device,
    dtype: torch.dtype,
    cached: torch.dtype,
    queries: int = 1,
) -> SplitPlan:
    """Allocates a plan for up to `rows` sequences, with queries of `dtype` and keys and values stored as `cached`.

    Rows of up to `queries` queries are computed, or as many more as take no more programs.
    """
    parts = -(-queries // most_queries(layer))
    items, queries = most_items(rows, capacity), most_queries(layer, parts)
    return SplitPlan(
        capacity=capacity,
        parts=parts,
        sizes=known_options(tiling(layer, dtype.itemsize, cached.itemsize, current())),
        item_rows=torch.full((items,), -1, dtype=torch.int32, device=device),
        cu_splits=torch.zeros(rows + 1, dtype=torch.int32, device=device),
        split_size=torch.ones(1, dtype=torch.int32, device=device),
        partial=torch.empty(items, queries, layer.heads, layer.value_head_size, device=device),
        logsum=torch.empty(items, queries, layer.heads, device=device),
        counters=torch.zeros(rows, parts, layer.kv_heads, dtype=torch.int32, device=device),
    )


def plan_batch(layer: Attention, batch: Batch, plan: SplitPlan, parts: int = 1) -> None:
    """Writes to `plan` how the contexts of the rows of `batch` are split that are computed in up to `parts` parts."""
    lengths, cu_queries = batch.lengths, batch.cu_queries
    items, tile = plan.item_rows[: most_items(len(lengths), plan.capacity)], plan.sizes["TILE"]
    limits = most_queries(layer), most_queries(layer, parts)
    plan_splits(lengths, cu_queries, plan.capacity, limits, tile, layer.window, items, plan.cu_splits, plan.split_size)


def split_attention(
    layer: Attention,
    batch: Batch,
    plan: SplitPlan,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    parts: int = 1,
) -> None:
    """Computes `paged_attention` of the rows with 1 to `most_queries` queries; other rows are not written.

    A layer with chunks is not computed: its programs would share what they do not see.
    `plan_batch` must have run on the same batch with as many `parts`, for a layer with the same constants.
    """
    rows = len(batch.slots)
    split_attention_kernel[most_items(rows, plan.capacity), layer.kv_heads, parts](
        out,
        plan.partial,
        plan.logsum,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.slots,
        batch.lengths,
        batch.cu_queries,
        plan.item_rows,
        plan.cu_splits,
        plan.split_size,
        plan.counters,
        sinks,
        batch.block_tables.stride(0),
        layer.scale,
        KV_HEADS=layer.kv_heads,
        GROUP=layer.group,
        HEAD_SIZE=layer.head_size,
        VALUE_SIZE=layer.value_head_size,
        VALUE_PADDED=triton.next_power_of_2(layer.value_head_size),
        BLOCK_SIZE=key_cache.shape[2],
        WINDOW=layer.window,
        CHUNK=layer.chunk,
        SOFT_CAP=layer.soft_cap,
        JOINED=splits_at_a_time(layer.group, layer.value_head_size),
        **plan.sizes,
        **launch_options(),
    )
