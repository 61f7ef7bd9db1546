"""Combines the partial results of contexts that several programs shared."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.attention_layer import SHAPES
from pagewire.kernels.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.jit import Configuration, jit

TILE = 16
"""Splits that are read at a time."""
WARPS = 2


@jit
def reduce_splits_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    logsum: tl.tensor,
    cu_splits: tl.tensor,
    cu_queries: tl.tensor,
    queries: tl.int32,
    limit: tl.int32,
    heads: tl.int32,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: one head of one query."""
    wait_for_previous(PDL)
    row = tl.program_id(0) // queries
    local = tl.program_id(0) % queries
    head = tl.program_id(1)
    first = tl.load(cu_queries + row)
    if local >= tl.load(cu_queries + row + 1) - first:
        return
    begin = tl.load(cu_splits + row)
    end = tl.load(cu_splits + row + 1)
    if end - begin <= 1:
        return
    dims = tl.arange(0, PADDED)
    accumulator = tl.zeros([PADDED], dtype=tl.float32)
    maximum = float("-inf")
    total = 0.0
    for start in tl.range(begin, end, TILE):
        items = start + tl.arange(0, TILE)
        mask = items < end
        lanes = (items.to(tl.int64) * limit + local) * heads + head
        sums = tl.load(logsum + lanes, mask=mask, other=float("-inf"))
        larger = tl.maximum(maximum, tl.max(sums, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(sums - base)
        shrink = tl.exp2(maximum - base)
        real = mask[:, None] & (dims < HEAD_SIZE)[None, :]
        values = tl.load(partial + lanes[:, None] * HEAD_SIZE + dims[None, :], mask=real, other=0.0)
        accumulator = accumulator * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        maximum = larger
    result = accumulator / tl.where(total > 0, total, 1.0)
    place = ((first + local).to(tl.int64) * heads + head) * HEAD_SIZE
    tl.store(out + place + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)


def reduce_splits(
    partial: torch.Tensor,
    logsum: torch.Tensor,
    cu_splits: torch.Tensor,
    cu_queries: torch.Tensor,
    out: torch.Tensor,
    queries: int,
) -> None:
    """Writes the average of each query's splits, weighted by their sums of weights, to `out` [T, heads, head_size].

    `partial` is float32 [items, queries, heads, head_size]; `logsum` is float32 [items, queries, heads], in base 2,
    minus infinity where a split saw nothing; `cu_splits` and `cu_queries` are int32 [R + 1]. Rows with less than two
    splits are skipped: the attention kernel has written their result. No other row has more than `queries` queries.
    """
    _, limit, heads, head_size = partial.shape
    reduce_splits_kernel[(len(cu_queries) - 1) * queries, heads](
        out,
        partial,
        logsum,
        cu_splits,
        cu_queries,
        queries,
        limit,
        heads,
        HEAD_SIZE=head_size,
        PADDED=triton.next_power_of_2(head_size),
        TILE=TILE,
        num_warps=WARPS,
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
    """Returns the variants that devices launch, for `pagewire.kernels.compile`."""
    heads = {(shape.layer.value_head_size, shape.dtype) for shape in SHAPES}
    return [
        Configuration(
            name=f"heads of {size} {dtype}",
            kernel=reduce_splits_kernel,
            tensors={"out": dtype, "partial": "fp32", "logsum": "fp32", "cu_splits": "i32", "cu_queries": "i32"},
            constants={"HEAD_SIZE": size, "PADDED": triton.next_power_of_2(size), "TILE": TILE},
            options={"num_warps": WARPS},
            spills=False,
        )
        for size, dtype in sorted(heads)
    ]
