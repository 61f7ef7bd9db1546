"""The variants of `kernels/triton/layers/integer_linear.py` that devices launch."""

from itertools import product

import torch

from pagewire.kernels.gpu_arch import PARTS, is_wide
from pagewire.kernels.triton.layers.integer_linear import integer_linear_kernel, layout_of, tiling, widening
from pagewire.kernels.triton.layers.split_inputs import splits_of
from tests.kernels.triton.ahead.configuration import Configuration

INPUTS = 4096
OUTPUTS = 6144
"""Inputs and outputs of the products in `configurations`."""


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch: a product of Llama-3-8B per format."""
    formats = (
        ("int4 groups of 128", "bf16", 4, 8, 128, False),
        ("int4 groups of 32 with minima", "bf16", 4, 0, 32, True),
        ("int4 groups of 32 with minima in float32", "fp32", 4, 0, 32, True),
        ("int8 groups of 16", "fp16", 8, 16, 16, False),
        ("int8 per output", "bf16", 8, 128, 4096, False),
    )
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    variants = []
    for (name, dtype, bits, zero, group, lowest), rows, wide in product(formats, (1, 32, 64, 512), (True, False)):
        per_word, words = layout_of(bits, group, INPUTS)
        form = tiling(rows, words, per_word, dtypes[dtype].itemsize, minima=lowest, wide=wide)
        tensors = {"out": dtype, "x": dtype, "codes": "i16", "scales": "fp32", "partial": "fp32", "counters": "i32"}
        constants = {
            "bias": None,
            "OUTPUTS": OUTPUTS,
            "INPUTS": INPUTS,
            "GROUP": group,
            "PER_WORD": per_word,
            "ZERO": zero,
            "ASM": widening(dtypes[dtype], bits, zero),
            "WORDS": words,
            "BLOCK_M": form.block_m,
            "BLOCK_N": form.block_n,
            "TILE": form.tile,
            "SPLITS": splits_of(rows, form.block_m, OUTPUTS, INPUTS // (per_word * words)),
        }
        variants.append(
            Configuration(
                name=f"{name}, {rows} rows{'' if wide else ', small tiles'}",
                kernel=integer_linear_kernel,
                tensors=tensors | ({"minima": "fp32"} if lowest else {}),
                constants=constants | ({} if lowest else {"minima": None}),
                options={"num_warps": form.warps, "num_stages": form.stages},
                spills=False,
                parts=tuple(part for part in PARTS if is_wide(part) == wide),
            )
        )
    return variants
