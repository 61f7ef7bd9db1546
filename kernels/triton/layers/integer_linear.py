"""Matrix product with weights as integers of 4 or 8 bits, which are widened in the inner loop.

The products of a group are summed before its scale multiplies them, so that the codes take part exactly. Two codes are
widened at a time, as bits of a float whose last place is 1. Source: Kim et al., Who Says Elephants Can't Run, 2022.
Few rows leave multiprocessors idle, so several programs share the inputs of an output, see `split_inputs`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels.gpu_arch import amd_part, current, is_wide, known_options
from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit
from pagewire.kernels.triton.last_program import is_last_program
from pagewire.kernels.triton.layers.split_inputs import counters_of, splits_of, store_split, sum_of_splits

LAYOUTS = {4: ((4, 64), (4, 32), (4, 16), (2, 32), (2, 16)), 8: ((2, 32), (2, 16))}
"""Codes in a word of 16 bits and words of an output in a step, by the bits of a code, the fastest layout first."""


@jit
def widened(  # type: ignore[no-untyped-def]
    words: tl.tensor, values: tl.tensor, PART: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr
):
    """Returns code PART of each word less the code of zero, in the dtype of `values`."""
    if ASM[PART] == "":
        code = (words.to(tl.int32) >> (BITS * PART)) & ((1 << BITS) - 1)
        return (code.to(tl.float32) - ZERO).to(values.dtype)
    return tl.inline_asm_elementwise(ASM[PART], "=r,r", [words], dtype=values.dtype, is_pure=True, pack=2)


@jit
def prefetch(  # type: ignore[no-untyped-def]
    codes: tl.tensor,
    step: tl.tensor,
    output: tl.tensor,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Asks for the first codes of a program, in lines of 128 bytes, so that they come while an earlier kernel runs."""
    PER_STEP: tl.constexpr = max(1, BLOCK_N * WORDS // 64)
    line = tl.arange(0, 128)
    step = tl.minimum(step + line // PER_STEP, STEPS - 1)
    place = tl.minimum((step * OUTPUTS + output) * WORDS + line % PER_STEP * 64, STEPS * OUTPUTS * WORDS - 1)
    address = (codes + place).to(tl.int64, bitcast=True)
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@jit
def scaled_products(  # type: ignore[no-untyped-def]
    x_start: tl.tensor,
    code_start: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    output: tl.tensor,
    live: tl.tensor,
    real: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the products [BLOCK_N, BLOCK_M] of the inputs of tiles [begin, end), of TILE of the WORDS of a step each.

    Weights are the first operand, which tensor cores read from registers. One loop over all inputs: with one over
    groups around one over tiles, loads would overlap within a group only.
    """
    BITS: tl.constexpr = 16 // PER_WORD
    WIDTH: tl.constexpr = WORDS * PER_WORD
    TILES: tl.constexpr = WORDS // TILE
    PARTS: tl.constexpr = min(PER_WORD, GROUP // WORDS)
    total = tl.zeros((output.shape[0], live.shape[0]), tl.float32)
    products = tl.zeros((output.shape[0], live.shape[0]), tl.float32)
    inputs = tl.zeros((TILE, live.shape[0]), tl.float32)
    scale = tl.load(scales + begin // TILES * WIDTH // GROUP * OUTPUTS + output, mask=real, other=0.0)
    for tile in range(begin, end):
        step = tile // TILES
        first = tile % TILES * TILE
        words = tl.load(code_start + step * (OUTPUTS * WORDS) + first, mask=real[:, None], other=0)
        for part in tl.static_range(PER_WORD):
            values = tl.load(x_start + (step * WIDTH + part * WORDS + first), mask=live[None, :], other=0.0)
            weights = widened(words, values, part, BITS, ZERO, ASM)
            if GROUP < INPUTS and part % PARTS == 0:
                # One group ahead, or every group would wait for its scale.
                following = (step * WIDTH + (part + PARTS) * WORDS) // GROUP
                if part + PARTS == PER_WORD:
                    following = (tile + 1) // TILES * WIDTH // GROUP
                next_scale = tl.load(
                    scales + following * OUTPUTS + output, mask=real & (following < INPUTS // GROUP), other=0.0
                )
                products = tl.dot(weights, values, input_precision="ieee")
                inputs = values.to(tl.float32)
            else:
                products = tl.dot(weights, values, products, input_precision="ieee")
                inputs += values.to(tl.float32)
            if GROUP < INPUTS and part % PARTS == PARTS - 1:
                total += products * scale[:, None]
                scale = next_scale
                if minima is not None:
                    group = (step * WIDTH + part * WORDS) // GROUP
                    minimum = tl.load(minima + group * OUTPUTS + output, mask=real, other=0.0)
                    total += minimum[:, None] * tl.sum(inputs, 0)[None, :]
    if GROUP == INPUTS:
        total = products * scale[:, None]
        if minima is not None:
            total += tl.sum(inputs, 0)[None, :] * tl.load(minima + output, mask=real, other=0.0)[:, None]
    return total


@jit
def integer_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    bias: tl.tensor,
    partial: tl.tensor,
    counters: tl.tensor,
    rows: tl.int32,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: BLOCK_M rows, BLOCK_N outputs, and one of SPLITS shares of the inputs."""
    STEPS: tl.constexpr = INPUTS // (WORDS * PER_WORD)
    SHARE: tl.constexpr = STEPS // SPLITS * (WORDS // TILE)
    split = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, real = row < rows, output < OUTPUTS
    column = tl.arange(0, TILE)
    code_start = codes + (output[:, None] * WORDS + column[None, :])
    x_start = x + (row.to(tl.int64)[None, :] * INPUTS + column[:, None])
    if ASM[0] != "":
        prefetch(codes, split * (STEPS // SPLITS), tl.program_id(1) * BLOCK_N, OUTPUTS, BLOCK_N, WORDS, STEPS)
    wait_for_previous(PDL)
    total = scaled_products(
        x_start, code_start, scales, minima, output, live, real, split * SHARE, (split + 1) * SHARE,
        OUTPUTS, INPUTS, GROUP, PER_WORD, ZERO, ASM, WORDS, TILE,
    )  # fmt: skip
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        store_split(total, partial, tile, split, SPLITS)
        if not is_last_program(counters + tile, SPLITS):
            return
        total = sum_of_splits(total, partial, tile, SPLITS)
    if bias is not None:
        total += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=live[None, :] & real[:, None])


class Tiling(NamedTuple):
    """Rows, outputs and words of a tile, warps and pipeline stages."""

    block_m: int
    block_n: int
    tile: int
    warps: int
    stages: int


def tiling(rows: int, words: int, per_word: int, itemsize: int, *, minima: bool, wide: bool) -> Tiling:
    """Returns the tiling of a product of `rows` rows of elements of `itemsize` bytes.

    On an H200 these were the fastest with 1, 16, 32, 64 and 512 rows, but for float32 and minima, which are unmeasured.
    `wide`: see `pagewire.kernels.gpu_arch.is_wide`.
    """
    if itemsize == 4:  # IEEE products on the ordinary cores: small tiles, or the accumulators spill
        return Tiling(16, 32, 16, 4, 2)
    if rows > 64:
        large = wide and not minima  # sums of inputs take registers
        return Tiling(128 if large else 64, 128, min(words, 32), 8, 3)
    if per_word == 4:
        few = Tiling(16, 64, words, 4, 4) if rows <= 16 else Tiling(32, 128, words, 4, 3)
        return few if rows <= 32 else Tiling(64, 64, words, 4, 3)
    few = Tiling(16, 128, words, 4, 5) if rows <= 16 else Tiling(32, 128, words, 4, 4)
    return few if rows <= 32 else Tiling(64, 128, words, 4, 3)


def widening(dtype: torch.dtype, bits: int, zero: int, *, amd: bool = False) -> tuple[str, ...]:
    """Returns the instructions that widen code 0, 1, ... of two words at a time to `dtype`; empty: there are none, as
    on AMD's GPUs.

    A bf16 number from 128 to 255 has a last place of 1, one from 2048 to 4095 of 16, and an fp16 number from 1024 to
    2047 of 1: the bits of a code are put there, and what is too much is subtracted.
    """
    if triton.knobs.runtime.interpret or amd or dtype not in {torch.bfloat16, torch.float16}:
        return ("",) * (16 // bits)
    kind, one = ("bf16x2", 0x3F803F80) if dtype == torch.bfloat16 else ("f16x2", 0x3C003C00)

    def number(value: float) -> int:
        """Returns the bits of two copies of a number."""
        return (int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF) * 0x10001

    def half(shift: int, mask: int, base: int, subtracted: float, target: str) -> str:
        """Returns instructions that put the masked bits of two words into the last places of `base`, and subtract."""
        shifted = f"shr.b32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
        return (
            f"{shifted} lop3.b32 t, t, {mask * 0x10001}, {base * 0x10001}, 0xEA; mov.b32 z, {number(-subtracted)};"
            f" fma.rn.{kind} {target}, t, o, z;"
        )

    instructions = []
    for part in range(16 // bits):
        if dtype == torch.float16:
            body = half(bits * part, (1 << bits) - 1, 0x6400, 1024 + zero, "$0")
        elif bits == 4:
            body = half(4 * part, 15, 0x4300, 128 + zero, "$0")
        else:
            low, high = half(8 * part, 15, 0x4300, 128 + zero % 16, "l"), zero // 16 * 16
            body = f"{low} {half(8 * part + 4, 15, 0x4500, 2048 + high, 't')} fma.rn.{kind} $0, l, o, t;"
        instructions.append(f"{{ .reg .b32 t, l, o, z; mov.b32 o, {one}; {body} }}")
    return tuple(instructions)


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """Weights [N, K] in the kernel's layout: scales * (codes - zero) + minima."""

    codes: torch.Tensor
    """int16 [steps, N, words], words of 16 bits. The code at bit 0 of word w is that of input w of a step, the next
    code that of input w + words, and so on: each dot product reads inputs that lie in a row.
    """
    scales: torch.Tensor
    """float32 [groups, N]."""
    minima: torch.Tensor | None
    """float32 [groups, N]."""
    per_word: int
    """Codes in a word."""
    zero: int
    """The code of the weight 0, where there are no minima."""
    counters: torch.Tensor
    """int32, a counter for each tile of outputs, 0 before and after each product."""

    @property
    def outputs(self) -> int:
        """Number of outputs, N."""
        return self.codes.shape[1]

    @property
    def inputs(self) -> int:
        """Number of inputs, K."""
        return self.codes.shape[0] * self.per_word * self.words

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.inputs // self.scales.shape[0]

    @property
    def words(self) -> int:
        """Words of an output in a step."""
        return self.codes.shape[2]


def layout_of(bits: int, group: int, inputs: int) -> tuple[int, int]:
    """Returns codes in a word and words of a step. The words of a step hold whole groups, or lie in one.

    Raises:
        ValueError: no layout has such groups.
    """
    for per_word, words in LAYOUTS[4 if bits == 4 else 8]:
        width = per_word * words
        if group % words == 0 and inputs % width == 0 and (group % width == 0 or width % group == 0):
            return per_word, words
    raise ValueError(f"groups of {group} inputs of {inputs} fill no step of the kernel")


def pack(codes: torch.Tensor, bits: int, scales: torch.Tensor, zero: int, minima: torch.Tensor | None) -> IntegerMatrix:
    """Returns weights in the kernel's layout: codes of 4 bits in a quarter of a word, all others in a half.

    Args:
        codes: uint8 [N, K].
        bits: of a code.
        scales: float32 [N, groups].
        zero: the code of 0 without minima.
        minima: float32 [N, groups] or None.

    Raises:
        ValueError: no layout has such groups.
    """
    outputs, inputs = codes.shape
    per_word, words = layout_of(bits, inputs // scales.shape[1], inputs)
    parts = codes.view(outputs, -1, per_word, words).int()
    packed = parts[:, :, 0]
    for part in range(1, per_word):
        packed = packed | parts[:, :, part] << (16 // per_word * part)
    stored = packed.to(torch.int16).transpose(0, 1).contiguous()
    lowest = None if minima is None else minima.T.contiguous()
    return IntegerMatrix(stored, scales.T.contiguous(), lowest, per_word, zero, counters_of(outputs, codes.device))


def integer_linear(x: torch.Tensor, weights: IntegerMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Writes x @ weights.T + bias to `out` [T, N]; `x` [T, K] is contiguous."""
    minima, wide = weights.minima is not None, is_wide(current())
    form = tiling(len(x), weights.words, weights.per_word, x.element_size(), minima=minima, wide=wide)
    grid = triton.cdiv(len(x), form.block_m), triton.cdiv(weights.outputs, form.block_n)
    splits = splits_of(len(x), form.block_m, weights.outputs, len(weights.codes))
    sums = grid[1] * splits * form.block_m * form.block_n if splits > 1 else 0
    partial = x.new_empty(sums, dtype=torch.float32)
    integer_linear_kernel[(*grid, splits)](
        out,
        x,
        weights.codes,
        weights.scales,
        weights.minima,
        bias,
        partial,
        weights.counters,
        len(x),
        OUTPUTS=weights.outputs,
        INPUTS=weights.inputs,
        GROUP=weights.group,
        PER_WORD=weights.per_word,
        ZERO=weights.zero,
        ASM=widening(x.dtype, 16 // weights.per_word, weights.zero, amd=bool(amd_part())),
        WORDS=weights.words,
        BLOCK_M=form.block_m,
        BLOCK_N=form.block_n,
        TILE=form.tile,
        SPLITS=splits,
        **known_options({"num_warps": form.warps, "num_stages": form.stages}),
        **launch_options(),
    )
