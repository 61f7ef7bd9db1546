"""Combines the partial results of contexts that several programs shared."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.attention_layer import SHAPES
from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import Configuration, jit

NUMBERS = 8192
"""Of partial results that a program reads at a time, at most, but for heads that are too many for it."""
MOST = 16
"""Splits that it reads at a time, at most."""
FEW = 1024
"""Programs of one head each that a GPU starts as fast as fewer; with more queries, a program has several heads."""


@jit
def reduce_splits_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    logsum: tl.tensor,
    cu_splits: tl.tensor,
    cu_queries: tl.tensor,
    limit: tl.int32,
    heads: tl.int32,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: GROUP heads of all queries of one row. Most have nothing to do, but starting one takes time."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    begin = tl.load(cu_splits + row)
    end = tl.load(cu_splits + row + 1)
    if end - begin <= 1:
        return
    first = tl.load(cu_queries + row)
    member = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED)
    head = tl.program_id(1) * GROUP + member
    real = (member < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    for local in tl.range(0, tl.load(cu_queries + row + 1) - first):
        accumulator = tl.zeros([PADDED_GROUP, PADDED], dtype=tl.float32)
        maximum = tl.full([PADDED_GROUP], float("-inf"), dtype=tl.float32)
        total = tl.zeros([PADDED_GROUP], dtype=tl.float32)
        for start in tl.range(begin, end, TILE):
            items = start + tl.arange(0, TILE)
            lanes = (items.to(tl.int64) * limit + local)[:, None] * heads + head[None, :]
            there = (items < end)[:, None] & (member < GROUP)[None, :]
            sums = tl.load(logsum + lanes, mask=there, other=float("-inf"))
            larger = tl.maximum(maximum, tl.max(sums, 0))
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp2(sums - base[None, :])
            shrink = tl.exp2(maximum - base)
            places = partial + lanes[:, :, None] * HEAD_SIZE + dims[None, None, :]
            values = tl.load(places, mask=there[:, :, None] & (dims < HEAD_SIZE)[None, None, :], other=0.0)
            accumulator = accumulator * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
            total = total * shrink + tl.sum(weights, 0)
            maximum = larger
        result = accumulator / tl.where(total > 0, total, 1.0)[:, None]
        place = ((first + local).to(tl.int64) * heads + head) * HEAD_SIZE
        tl.store(out + place[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=real)


def tiling(group: int, head_size: int) -> dict[str, int]:
    """Returns the tile sizes, warps and registers of a program with `group` heads."""
    padded, padded_group = triton.next_power_of_2(head_size), triton.next_power_of_2(group)
    tile = min(MOST, max(1, NUMBERS // (padded * padded_group)))
    warps = min(8, max(1, tile * padded * padded_group // 1024))
    # By default the assembler targets fewer registers for some forms, and spills.
    return {"PADDED": padded, "PADDED_GROUP": padded_group, "TILE": tile, "num_warps": warps, "maxnreg": 128}


def reduce_splits(
    partial: torch.Tensor,
    logsum: torch.Tensor,
    cu_splits: torch.Tensor,
    cu_queries: torch.Tensor,
    out: torch.Tensor,
    group: int,
) -> None:
    """Writes the average of each query's splits, weighted by their sums of weights, to `out` [T, heads, head_size].

    `partial` is float32 [items, queries, heads, head_size]; `logsum` is float32 [items, queries, heads], in base 2,
    minus infinity where a split saw nothing; `cu_splits` and `cu_queries` are int32 [R + 1]. Rows with less than two
    splits are skipped: the attention kernel has written their result. `group` heads share a KV head.
    """
    _, limit, heads, head_size = partial.shape
    rows = len(cu_queries) - 1
    if rows * heads <= FEW:
        group = 1
    reduce_splits_kernel[rows, heads // group](
        out,
        partial,
        logsum,
        cu_splits,
        cu_queries,
        limit,
        heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        **tiling(group, head_size),
        **launch_options(),
    )


def reference(
    partial: torch.Tensor, logsum: torch.Tensor, cu_splits: torch.Tensor, cu_queries: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Returns `out` after `reduce_splits`, in float64."""
    result = out.double()
    for row in range(len(cu_queries) - 1):
        begin, end = cu_splits[row : row + 2].tolist()
        first, last = cu_queries[row : row + 2].tolist()
        if end - begin > 1 and last > first:
            weights = torch.exp2(logsum[begin:end, : last - first].double())
            weighted = (partial[begin:end, : last - first].double() * weights[..., None]).sum(0)
            result[first:last] = weighted / weights.sum(0).clamp(min=1e-300)[..., None]
    return result


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch, for `pagewire.kernels.triton.compile`."""
    heads = {(group, shape.layer.value_head_size, shape.dtype) for shape in SHAPES for group in (1, shape.layer.group)}
    found = []
    for group, size, dtype in sorted(heads):
        sizes = tiling(group, size)
        found.append(
            Configuration(
                name=f"{group} heads of {size} {dtype}",
                kernel=reduce_splits_kernel,
                tensors={"out": dtype, "partial": "fp32", "logsum": "fp32", "cu_splits": "i32", "cu_queries": "i32"},
                constants={"GROUP": group, "HEAD_SIZE": size} | {key: sizes[key] for key in sizes if key.isupper()},
                options={key: sizes[key] for key in sizes if key.islower()},
                spills=False,
            )
        )
    return found
