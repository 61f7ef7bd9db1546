"""The variants of `kernels/triton/layers/round_rows.py` that devices launch."""

import torch

from pagewire.kernels.triton.layers.round_rows import LARGEST, LEAST, TILE, round_rows_kernel
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.gpus import parts_with


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    variants = []
    for name, stored, dtype, group in (
        ("int8 per row", "i8", torch.int8, 4096),
        ("fp8 per row", "fp8e4nv", torch.float8_e4m3fn, 4096),
        ("fp8 per 128", "fp8e4nv", torch.float8_e4m3fn, 128),
    ):
        constants = {
            "INPUTS": 4096,
            "GROUP": group,
            "LARGEST": LARGEST[dtype],
            "INTEGERS": dtype == torch.int8,
            "LEAST": LEAST,
            "TILE": min(TILE, group),
        }
        tensors = {"out": stored, "scales": "fp32", "x": "bf16"}
        variants.append(Configuration(name, round_rows_kernel, tensors, constants, parts=parts_with(stored)))
    return variants
