"""Matrix product with weights as integers of 4 or 8 bits, which are widened in the inner loop.

The products of a group are summed before its scale multiplies them, so that the codes take part exactly.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire.kernels.jit import Configuration, jit
from pagewire.kernels.linear_tiles import tiles


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
    column = tl.arange(0, TILE)
    live, real = row < rows, output < OUTPUTS
    x_start = x + (row.to(tl.int64)[None, :] * INPUTS + column[:, None])
    code_start = codes + (output.to(tl.int64)[:, None] * (INPUTS // PER_BYTE) + column[None, :])
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(INPUTS // (TILE * PER_BYTE)):
        first = tile * TILE * PER_BYTE
        group = first // GROUP
        packed = tl.load(code_start + tile * TILE, mask=real[:, None], other=0)
        scale = tl.load(scales + group * OUTPUTS + output, mask=real, other=0.0)
        products = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        inputs = tl.zeros((TILE, BLOCK_M), tl.float32)
        for part in tl.static_range(PER_BYTE):
            values = tl.load(x_start + (first + part * TILE), mask=live[None, :], other=0.0)
            code = packed
            if PER_BYTE == 2:
                code = (packed >> (4 * part)) & 15
            weights = (code.to(tl.float32) - ZERO).to(x.dtype.element_ty)
            products = tl.dot(weights, values, products, input_precision="ieee")
            if minima is not None:
                inputs += values.to(tl.float32)
        total += products * scale[:, None]
        if minima is not None:
            minimum = tl.load(minima + group * OUTPUTS + output, mask=real, other=0.0)
            total += minimum[:, None] * tl.sum(inputs, 0)[None, :]
    if bias is not None:
        total += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=live[None, :] & real[:, None])


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
        return tile_of(self.group, self.per_byte)


def tile_of(group: int, per_byte: int) -> int:
    """Returns the inputs of one product, so that the bytes of one tile hold at most 64 inputs of one group.

    Raises:
        ValueError: 16 bytes hold more than a group.
    """
    for together in (64, 32, 16):
        if group % together == 0 and together >= 16 * per_byte:
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
    group = inputs // scales.shape[1]
    per_byte = 2 if bits == 4 and group % 32 == 0 else 1
    if per_byte == 2:
        halves = codes.view(outputs, -1, 2, tile_of(group, 2))
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    tile_of(group, per_byte)
    lowest = None if minima is None else minima.T.contiguous()
    return IntegerMatrix(codes.contiguous(), scales.T.contiguous(), lowest, per_byte, zero)


def integer_linear(x: torch.Tensor, weights: IntegerMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Writes x @ weights.T + bias to `out` [T, N]; `x` [T, K] is contiguous."""
    block_m, block_n, warps, stages = tiles(len(x), x.element_size())
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


def configurations() -> list[Configuration]:
    """Returns variants that devices launch, for `pagewire.kernels.compile`: a product of Llama-3-8B in each format."""
    found = []
    for name, rows, per_byte, zero, group, lowest in (
        ("int4 groups of 128, 1 row", 1, 2, 8, 128, False),
        ("int4 groups of 128, 512 rows", 512, 2, 8, 128, False),
        ("int4 groups of 32 with minima, 64 rows", 64, 2, 0, 32, True),
        ("int4 groups of 32 with minima in float32, 64 rows", 64, 2, 0, 32, True),
        ("int8 groups of 16, 1 row", 1, 1, 16, 16, False),
        ("int8 per output, 512 rows", 512, 1, 128, 4096, False),
    ):
        dtype = "fp32" if "float32" in name else "bf16"
        block_m, block_n, warps, stages = tiles(rows, 4 if dtype == "fp32" else 2)
        tensors = {"out": dtype, "x": dtype, "codes": "u8", "scales": "fp32"} | ({"minima": "fp32"} if lowest else {})
        constants = {
            "bias": None,
            "OUTPUTS": 6144,
            "INPUTS": 4096,
            "GROUP": group,
            "PER_BYTE": per_byte,
            "ZERO": zero,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "TILE": tile_of(group, per_byte),
        } | ({} if lowest else {"minima": None})
        options = {"num_warps": warps, "num_stages": stages}
        found.append(Configuration(name, integer_linear_kernel, tensors, constants, options, spills=False))
    return found
