"""Products of a mixture of experts: tokens are grouped by expert, and each group is multiplied by its own matrix."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import Configuration, jit
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
    wanted = column < outputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, SIZE, DEPTH):
        inner = first + tl.arange(0, DEPTH)
        within = inner < SIZE
        left = tl.load(x + row[:, None] * SIZE + inner[None, :], mask=real[:, None] & within[None, :], other=0.0)
        matrix = weight + (expert * outputs + column[None, :].to(tl.int64)) * SIZE + inner[:, None]
        right = tl.load(matrix, mask=within[:, None] & wanted[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    goal = out + place[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(goal, total.to(out.dtype.element_ty), mask=real[:, None] & wanted[None, :])


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, groups: Groups, *, gather: bool) -> torch.Tensor:
    """Returns [P, outputs]: for each place of `groups`, a row of x times its expert's matrix, summed in float32.

    Args:
        x: [T, size] with `gather`, else [P, size] in the order of the places; contiguous.
        weight: [experts, outputs, size], contiguous, of the same dtype.
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


def reference(x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns [T, K, outputs] in float64: the row of each token times the matrices of its experts `chosen` [T, K]."""
    return torch.einsum("ts,tkos->tko", x.double(), weight.double()[chosen])


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch, for `pagewire.kernels.triton.compile`."""
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": DEPTH}
    return [
        Configuration(
            f"{name} {dtype}",
            grouped_linear_kernel,
            {"out": dtype, "x": dtype, "weight": dtype, "pairs": "i32", "tiles": "i32"},
            {"SIZE": size, "SHARE": share, **sizes},
        )
        for name, size, share, dtype in (
            ("qwen3-30b-a3b up", 2048, 8, "bf16"),
            ("qwen3-30b-a3b down", 768, 0, "bf16"),
            ("qwen1.5-moe-a2.7b up", 2048, 4, "bf16"),
            ("qwen1.5-moe-a2.7b down", 1408, 0, "bf16"),
            ("mixtral-8x7b up", 4096, 2, "bf16"),
            ("mixtral-8x7b down", 14336, 0, "bf16"),
            ("mixtral-8x7b down", 14336, 0, "fp32"),
        )
    ]
