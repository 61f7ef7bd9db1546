"""Products of a mixture of experts: tokens are grouped by expert, and each group is multiplied by its own matrix."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit
from pagewire.kernels.triton.layers.moe_routing import ROWS, Groups

COLUMNS = 64
DEPTH = 64


@jit
def grouped_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    outputs: tl.int32,
    SIZE: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: COLUMNS outputs of one tile. SHARE is the number of pairs that read a row of x, 0: one each."""
    wait_for_previous(PDL)
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile + 1) + tl.arange(0, ROWS)
    real = place < tl.load(tile + 2)
    row = place.to(tl.int64)
    if SHARE > 0:
        row = tl.load(pairs + place, mask=real, other=0).to(tl.int64) // SHARE
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_column = column < outputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, SIZE, DEPTH):
        inner = first + tl.arange(0, DEPTH)
        within = inner < SIZE
        left = tl.load(x + row[:, None] * SIZE + inner[None, :], mask=real[:, None] & within[None, :], other=0.0)
        matrix = weight + (expert * outputs + column[None, :].to(tl.int64)) * SIZE + inner[:, None]
        right = tl.load(matrix, mask=within[:, None] & real_column[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    goal = out + place[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(goal, total.to(out.dtype.element_ty), mask=real[:, None] & real_column[None, :])


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, groups: Groups, *, gather: bool) -> torch.Tensor:
    """Returns [P, outputs]: for each place of `groups`, a row of x times its expert's matrix, summed in float32.

    Rows behind the places of this rank's experts are undefined.

    Args:
        x: [T, size] with `gather`, else [P, size] in the order of the places; contiguous.
        weight: [experts of this rank, outputs, size], contiguous, of the same dtype.
        groups: result of `moe_routing.group`.
        gather: whether the row is that of the pair's token.
    """
    pairs, outputs = len(groups.pairs), weight.shape[1]
    out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
    share = pairs // len(x) if gather else 0
    grid = len(groups.tiles), triton.cdiv(outputs, COLUMNS)
    grouped_linear_kernel[grid](
        out,
        x,
        weight,
        groups.pairs,
        groups.tiles,
        outputs,
        SIZE=x.shape[1],
        SHARE=share,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        **launch_options(),
    )
    return out
