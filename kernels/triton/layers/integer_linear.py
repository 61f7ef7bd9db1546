"""Matrix product with weights as integers of 4 or 8 bits, which are widened in the inner loop.

The products of a group are summed before its scale multiplies them, so that the codes take part exactly.
"""

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl

from pagewire.kernels.gpu_arch import PARTS, current, is_wide
from pagewire.kernels.triton.jit import Configuration, jit
from pagewire.kernels.triton.layers.linear_tiles import tiles


@jit
def widened(packed: tl.tensor, PART: tl.constexpr, PER_BYTE: tl.constexpr, ZERO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns codes less the code of zero, in float32: those of one half of the bytes, if two are in a byte."""
    code = packed
    if PER_BYTE == 2:
        code = (packed >> (4 * PART)) & 15
    return code.to(tl.float32) - ZERO


@jit
def sums_of_all(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    row: tl.tensor,
    output: tl.tensor,
    live: tl.tensor,
    real: tl.tensor,
    INPUTS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    ZERO: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the products [BLOCK_M, BLOCK_N] where all inputs of an output share a scale."""
    column = tl.arange(0, TILE)
    x_start = x + (row.to(tl.int64)[:, None] * INPUTS + column[None, :])
    code_start = codes + (output.to(tl.int64)[None, :] * (INPUTS // PER_BYTE) + column[:, None])
    products = tl.zeros((row.shape[0], output.shape[0]), tl.float32)
    inputs = tl.zeros((row.shape[0], TILE), tl.float32)
    for first in range(0, INPUTS, TILE * PER_BYTE):
        packed = tl.load(code_start + first // PER_BYTE, mask=real[None, :], other=0)
        for part in tl.static_range(PER_BYTE):
            values = tl.load(x_start + (first + part * TILE), mask=live[:, None], other=0.0)
            weights = widened(packed, part, PER_BYTE, ZERO).to(values.dtype)
            products = tl.dot(values, weights, products, input_precision="ieee")
            if minima is not None:
                inputs += values.to(tl.float32)
    total = products * tl.load(scales + output, mask=real, other=0.0)[None, :]
    if minima is not None:
        total += tl.sum(inputs, 1)[:, None] * tl.load(minima + output, mask=real, other=0.0)[None, :]
    return total


@jit
def sums_of_groups(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    row: tl.tensor,
    output: tl.tensor,
    live: tl.tensor,
    real: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_BYTE: tl.constexpr,
    ZERO: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the products [BLOCK_M, BLOCK_N] where inputs have scales by group.

    Weights are the first operand, which the tensor cores of sm_90 read from registers: as measured, this is faster here
    and slower in `sums_of_all`. A loop over groups around one over tiles would overlap loads within a group only.
    """
    column = tl.arange(0, TILE)
    x_start = x + (row.to(tl.int64)[None, :] * INPUTS + column[:, None])
    code_start = codes + (output.to(tl.int64)[:, None] * (INPUTS // PER_BYTE) + column[None, :])
    total = tl.zeros((output.shape[0], row.shape[0]), tl.float32)
    for first in range(0, INPUTS, TILE * PER_BYTE):
        group = first // GROUP
        packed = tl.load(code_start + first // PER_BYTE, mask=real[:, None], other=0)
        scale = tl.load(scales + group * OUTPUTS + output, mask=real, other=0.0)
        products = tl.zeros((output.shape[0], row.shape[0]), tl.float32)
        inputs = tl.zeros((TILE, row.shape[0]), tl.float32)
        for part in tl.static_range(PER_BYTE):
            values = tl.load(x_start + (first + part * TILE), mask=live[None, :], other=0.0)
            weights = widened(packed, part, PER_BYTE, ZERO).to(values.dtype)
            products = tl.dot(weights, values, products, input_precision="ieee")
            if minima is not None:
                inputs += values.to(tl.float32)
        total += products * scale[:, None]
        if minima is not None:
            minimum = tl.load(minima + group * OUTPUTS + output, mask=real, other=0.0)
            total += minimum[:, None] * tl.sum(inputs, 0)[None, :]
    return tl.trans(total)


@jit
def integer_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    bias: tl.tensor,
    rows: tl.int32,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_BYTE: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program: BLOCK_M rows and BLOCK_N outputs."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, real = row < rows, output < OUTPUTS
    if GROUP == INPUTS:
        total = sums_of_all(
            x, codes, scales, minima, row, output, live, real, INPUTS, PER_BYTE, ZERO, TILE
        )  # fmt: skip
    else:
        total = sums_of_groups(
            x, codes, scales, minima, row, output, live, real, OUTPUTS, INPUTS, GROUP, PER_BYTE, ZERO, TILE
        )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=live[:, None] & real[None, :])


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """Weights [N, K] in the kernel's layout: scales * (codes - zero) + minima."""

    codes: torch.Tensor
    """uint8 [N, K / per_byte]. With two codes in a byte, each 2 * `tile` inputs are `tile` bytes: the first half of the
    inputs in the low bits, the second in the high bits.
    """
    scales: torch.Tensor
    """float32 [groups, N]."""
    minima: torch.Tensor | None
    """float32 [groups, N]."""
    per_byte: int
    zero: int

    @property
    def outputs(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        """K."""
        return self.codes.shape[1] * self.per_byte

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.inputs // self.scales.shape[0]

    @property
    def tile(self) -> int:
        """Inputs of one product, all in one group."""
        return tile_of(self.group, self.per_byte, wide=is_wide(current()))


def tile_of(group: int, per_byte: int, *, wide: bool) -> int:
    """Returns the inputs of one product, so that the bytes of one tile hold at most 128 inputs of one group, or 64.

    `wide`: see `pagewire.kernels.gpu_arch.is_wide`.

    Raises:
        ValueError: 16 bytes hold more than a group.
    """
    for together in (128, 64, 32, 16):
        if group % together == 0 and together >= 16 * per_byte and (wide or together < 128):
            return together // per_byte
    raise ValueError(f"groups of {group} inputs are no multiple of {16 * per_byte}")


def pack(codes: torch.Tensor, bits: int, scales: torch.Tensor, zero: int, minima: torch.Tensor | None) -> IntegerMatrix:
    """Returns weights in the kernel's layout: codes of 4 bits in halves of a byte, all others in a byte.

    Args:
        codes: uint8 [N, K].
        bits: of a code.
        scales: float32 [N, groups].
        zero: the code of 0 without minima.
        minima: float32 [N, groups] or None.

    Raises:
        ValueError: the groups are no multiple of 16 inputs.
    """
    outputs, inputs = codes.shape
    group, wide = inputs // scales.shape[1], is_wide(current())
    per_byte = 2 if bits == 4 and group % 32 == 0 else 1
    if per_byte == 2:
        halves = codes.view(outputs, -1, 2, tile_of(group, 2, wide=wide))
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    tile_of(group, per_byte, wide=wide)
    lowest = None if minima is None else minima.T.contiguous()
    return IntegerMatrix(codes.contiguous(), scales.T.contiguous(), lowest, per_byte, zero)


def integer_linear(x: torch.Tensor, weights: IntegerMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Writes x @ weights.T + bias to `out` [T, N]; `x` [T, K] is contiguous."""
    grouped = weights.group < weights.inputs
    block_m, block_n, warps, stages = tiles(len(x), x.element_size(), grouped=grouped)
    integer_linear_kernel[triton.cdiv(len(x), block_m), triton.cdiv(weights.outputs, block_n)](
        out,
        x,
        weights.codes,
        weights.scales,
        weights.minima,
        bias,
        len(x),
        OUTPUTS=weights.outputs,
        INPUTS=weights.inputs,
        GROUP=weights.group,
        PER_BYTE=weights.per_byte,
        ZERO=weights.zero,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TILE=weights.tile,
        num_warps=warps,
        num_stages=stages,
    )


def reference(x: torch.Tensor, weights: IntegerMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns `integer_linear` in float64."""
    codes = weights.codes
    if weights.per_byte == 2:
        halves = codes.view(weights.outputs, -1, weights.tile)
        codes = torch.stack((halves & 15, halves >> 4), 2).flatten(1)
    groups = (codes.double() - weights.zero).view(weights.outputs, -1, weights.group)
    groups = groups * weights.scales.T.double()[:, :, None]
    if weights.minima is not None:
        groups = groups + weights.minima.T.double()[:, :, None]
    product = x.double() @ groups.flatten(1).T
    return product if bias is None else product + bias.double()


INPUTS = 4096
"""Of the products in `configurations`."""


def configurations() -> list[Configuration]:
    """Returns variants that devices launch, for `triton.compile`: a product of Llama-3-8B in each format."""
    forms = (
        ("int4 groups of 128, 1 row", "bf16", 1, 2, 8, 128, False),
        ("int4 groups of 128, 512 rows", "bf16", 512, 2, 8, 128, False),
        ("int4 groups of 32 with minima, 64 rows", "bf16", 64, 2, 0, 32, True),
        ("int4 groups of 32 with minima, 64 rows in float32", "fp32", 64, 2, 0, 32, True),
        ("int8 groups of 16, 1 row", "bf16", 1, 1, 16, 16, False),
        ("int8 per output, 1 row", "bf16", 1, 1, 128, 4096, False),
        ("int8 per output, 512 rows", "bf16", 512, 1, 128, 4096, False),
    )
    found = []
    for (name, dtype, rows, per_byte, zero, group, lowest), wide in product(forms, (True, False)):
        block_m, block_n, warps, stages = tiles(rows, 4 if dtype == "fp32" else 2, grouped=group < INPUTS)
        tensors = {"out": dtype, "x": dtype, "codes": "u8", "scales": "fp32"} | ({"minima": "fp32"} if lowest else {})
        constants = {
            "bias": None,
            "OUTPUTS": 6144,
            "INPUTS": INPUTS,
            "GROUP": group,
            "PER_BYTE": per_byte,
            "ZERO": zero,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "TILE": tile_of(group, per_byte, wide=wide),
        } | ({} if lowest else {"minima": None})
        found.append(
            Configuration(
                name=f"{name}{'' if wide else ', small tiles'}",
                kernel=integer_linear_kernel,
                tensors=tensors,
                constants=constants,
                options={"num_warps": warps, "num_stages": stages},
                spills=False,
                parts=tuple(part for part in PARTS if is_wide(part) == wide),
            )
        )
    return found
