"""Rounds activations to eight bits, with a scale per row and group of inputs."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest number of each dtype, to which the largest of a group is scaled."""
LEAST = 1e-10
"""Scale of a group of zeros."""
TILE = 1024


@jit
def round_rows_kernel(
    out: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGERS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: one group of one row."""
    wait_for_previous(PDL)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = row * INPUTS + group * GROUP
    column = tl.arange(0, TILE)
    largest = tl.zeros((TILE,), tl.float32)
    lost = tl.zeros((TILE,), tl.int32)  # whether a value is NaN, which a maximum does not keep
    for first in range(0, GROUP, TILE):
        values = tl.load(x + start + first + column, mask=first + column < GROUP, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
        lost |= (values != values).to(tl.int32)  # noqa: PLR0124
    scale = tl.maximum(tl.max(largest, 0) / LARGEST, LEAST)
    scale = tl.where(tl.max(lost, 0) > 0, float("nan"), scale)
    tl.store(scales + row * (INPUTS // GROUP) + group, scale)
    for first in range(0, GROUP, TILE):
        real = first + column < GROUP
        values = tl.load(x + start + first + column, mask=real, other=0.0).to(tl.float32) / scale
        values = tl.floor(values + 0.5) if INTEGERS else tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        tl.store(out + start + first + column, values.to(out.dtype.element_ty), mask=real)


def round_rows(x: torch.Tensor, group: int, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes x / scale, rounded, to `out` [T, K] and the scales to `scales` float32 [T, K / group].

    The dtype of `out` is one of `LARGEST`; `x` [T, K] is contiguous. Halves are rounded up for integers.
    """
    rows, inputs = x.shape
    round_rows_kernel[rows, inputs // group](
        out,
        scales,
        x,
        INPUTS=inputs,
        GROUP=group,
        LARGEST=LARGEST[out.dtype],
        INTEGERS=out.dtype == torch.int8,
        LEAST=LEAST,
        TILE=min(TILE, triton.next_power_of_2(group)),
        **launch_options(),
    )
