"""The variants of `kernels/triton/layers/integer_linear.py` that devices launch."""

from itertools import product
from typing import NamedTuple

import torch

from pagewire.kernels.gpu_arch import PARTS, is_wide
from pagewire.kernels.triton.layers.integer_linear import integer_linear_kernel, layout_of, tiling, widening
from pagewire.kernels.triton.layers.split_inputs import splits_of
from tests.kernels.triton.ahead.configuration import Configuration

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Format(NamedTuple):
    """A format of weights."""

    name: str
    dtype: str
    """Element type of the activations by Triton's name."""
    bits: int
    zero: int
    """The code of the weight 0."""
    group: int
    """Inputs that share a scale."""
    minima: bool = False


FORMATS = (
    Format("int4 groups of 128", "bf16", 4, 8, 128),
    Format("int4 groups of 32 with minima", "bf16", 4, 0, 32, minima=True),
    Format("int4 groups of 32 with minima in float32", "fp32", 4, 0, 32, minima=True),
    Format("int8 groups of 16", "fp16", 8, 16, 16),
    Format("int8 per output", "bf16", 8, 128, 4096),
)


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch: a product of Llama-3-8B per format."""
    return [variant(*case) for case in product(FORMATS, (1, 32, 64, 512), (True, False))]


def variant(form: Format, rows: int, wide: bool, *, outputs: int = 6144, inputs: int = 4096) -> Configuration:
    """Returns the variant of a product of `rows` rows; `wide`: see `pagewire.kernels.gpu_arch.is_wide`."""
    per_word, words = layout_of(form.bits, form.group, inputs)
    tiles = tiling(rows, words, per_word, DTYPES[form.dtype].itemsize, minima=form.minima, wide=wide)
    tensors = {"out": form.dtype, "x": form.dtype, "codes": "i16"}
    tensors |= {"scales": "fp32", "partial": "fp32", "counters": "i32"}
    constants = {
        "bias": None,
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "GROUP": form.group,
        "PER_WORD": per_word,
        "ZERO": form.zero,
        "ASM": widening(DTYPES[form.dtype], form.bits, form.zero),
        "WORDS": words,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "TILE": tiles.tile,
        "SPLITS": splits_of(rows, tiles.block_m, outputs, inputs // (per_word * words)),
    }
    return Configuration(
        name=f"{form.name}, {rows} rows{'' if wide else ', small tiles'}",
        kernel=integer_linear_kernel,
        tensors=tensors | ({"minima": "fp32"} if form.minima else {}),
        constants=constants | ({} if form.minima else {"minima": None}),
        options={"num_warps": tiles.warps, "num_stages": tiles.stages},
        spills=False,
        parts=tuple(part for part in PARTS if is_wide(part) == wide),
    )
