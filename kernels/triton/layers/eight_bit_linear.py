"""Matrix product of activations and weights that are both of eight bits: int8, or floats in the format e4m3."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire.kernels.gpu_arch import known_options
from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit
from pagewire.kernels.triton.last_program import is_last_program
from pagewire.kernels.triton.layers.split_inputs import splits_of, store_split, sum_of_splits

TILES = (128, 64, 32)
"""Inputs of one product: the first that divides a group."""


def tiles(rows: int) -> tuple[int, int, int, int]:
    """Returns rows and outputs of a tile, warps and pipeline stages, for `rows` rows.

    Few rows wait for the weights: narrow tiles spread them over more programs. With 1, 64 and 512 rows these were among
    the fastest on an H200; all others are unmeasured.
    """
    if rows <= 16:
        return 16, 32, 4, 6
    if rows <= 32:
        return 32, 64, 4, 4
    if rows <= 64:
        return 64, 64, 4, 3
    return 128, 128, 8, 3


@jit
def eight_bit_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    partial: tl.tensor,
    counters: tl.tensor,
    rows: tl.int32,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: BLOCK_M rows, BLOCK_N outputs, and one of SPLITS shares of the inputs."""
    wait_for_previous(PDL)
    SHARE: tl.constexpr = INPUTS // SPLITS
    split = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, TILE)
    live, real = row < rows, output < OUTPUTS
    row_start = x + (row.to(tl.int64)[:, None] * INPUTS + column[None, :])
    weight_start = weights + (output.to(tl.int64)[None, :] * INPUTS + column[:, None])
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGERS else tl.float32)
    # One loop over all inputs: with one over groups around one over tiles, loads would overlap within a group only.
    for first in range(split * SHARE, (split + 1) * SHARE, TILE):
        left = tl.load(row_start + first, mask=live[:, None], other=0.0)
        right = tl.load(weight_start + first, mask=real[None, :], other=0.0)
        if GROUP < INPUTS:
            products = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGERS else tl.float32)
        if INTEGERS:
            products = tl.dot(left, right, products, out_dtype=tl.int32)
        else:
            # The tensor cores of sm_90 keep 14 bits of a sum of fp8 products: only those of a tile are summed so.
            products = tl.dot(left, right, products, max_num_imprecise_acc=TILE)
        if GROUP < INPUTS:
            group = first // GROUP
            scale = tl.load(scales + group * OUTPUTS + output, mask=real, other=0.0)
            row_scale = tl.load(x_scales + row * (INPUTS // GROUP) + group, mask=live, other=0.0)
            total += products.to(tl.float32) * row_scale[:, None] * scale[None, :]
    if GROUP == INPUTS:
        scale = tl.load(scales + output, mask=real, other=0.0)
        total = products.to(tl.float32) * tl.load(x_scales + row, mask=live, other=0.0)[:, None] * scale[None, :]
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        store_split(total, partial, tile, split, SPLITS)
        if not is_last_program(counters + tile, SPLITS):
            return
        total = sum_of_splits(total, partial, tile, SPLITS)
    if bias is not None:
        total += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=live[:, None] & real[None, :])


@dataclass(frozen=True, slots=True)
class EightBitMatrix:
    """Weights values * scales [N, K]."""

    values: torch.Tensor
    """int8 or float8_e4m3fn [N, K]."""
    scales: torch.Tensor
    """float32 [groups, N]."""
    counters: torch.Tensor
    """int32, a counter for each tile of outputs, 0 before and after each product."""

    @property
    def group(self) -> int:
        """Number of inputs that share a scale, in the weights and in the activations."""
        return self.values.shape[1] // self.scales.shape[0]


def tile_of(group: int) -> int:
    """Returns the inputs of one product.

    Raises:
        ValueError: the groups are no multiple of 32 inputs.
    """
    for tile in TILES:
        if group % tile == 0:
            return tile
    raise ValueError(f"groups of {group} inputs are no multiple of {TILES[-1]}")


def eight_bit_linear(
    x: torch.Tensor, x_scales: torch.Tensor, weights: EightBitMatrix, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Writes (x * x_scales) @ weights.T + bias to `out` [T, N].

    `x` [T, K], of the dtype of the weights, and `x_scales` float32 [T, groups] are those of `round_rows`.
    """
    outputs, inputs = weights.values.shape
    block_m, block_n, warps, stages = tiles(len(x))
    grid = triton.cdiv(len(x), block_m), triton.cdiv(outputs, block_n)
    splits = splits_of(len(x), block_m, outputs, inputs // tile_of(weights.group))
    sums = grid[1] * splits * block_m * block_n if splits > 1 else 0
    partial = x.new_empty(sums, dtype=torch.float32)
    eight_bit_linear_kernel[(*grid, splits)](
        out,
        x,
        x_scales,
        weights.values,
        weights.scales,
        bias,
        partial,
        weights.counters,
        len(x),
        OUTPUTS=outputs,
        INPUTS=inputs,
        GROUP=weights.group,
        INTEGERS=weights.values.dtype == torch.int8,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TILE=tile_of(weights.group),
        SPLITS=splits,
        **known_options({"num_warps": warps, "num_stages": stages}),
        **launch_options(),
    )
