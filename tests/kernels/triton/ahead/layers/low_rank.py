"""The variants of `kernels/triton/layers/low_rank.py` that devices launch."""

from pagewire.kernels.triton.layers.low_rank import (
    COLUMNS,
    DEPTH,
    FIELDS,
    PARTS,
    RANKS,
    ROWS,
    expand_kernel,
    shrink_kernel,
    splits_of,
)
from tests.kernels.triton.ahead.configuration import Configuration


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    variants = []
    fixed = {"FIELDS": FIELDS, "ROWS": ROWS, "RANKS": RANKS}
    for name, inputs, outputs, dtype in (
        ("llama-3-8b qkv", 4096, 6144, "bf16"),
        ("llama-3-8b o", 4096, 4096, "bf16"),
        ("llama-3-8b gate, up", 4096, 28672, "bf16"),
        ("llama-3-8b down", 14336, 4096, "bf16"),
        ("llama-3-8b down", 14336, 4096, "fp32"),
        ("llama-3-70b on 4 GPUs qkv", 8192, 2560, "bf16"),
        ("llama-3-70b on 4 GPUs o", 2048, 8192, "bf16"),
        ("llama-3-70b on 4 GPUs gate, up", 8192, 14336, "bf16"),
        ("llama-3-70b on 4 GPUs down", 7168, 8192, "bf16"),
    ):
        numbers = {"factors": dtype, "table": "i32", "tiles": "i32", "tokens": "i32", "partial": "fp32"}
        sizes = {"SPLITS": splits_of(inputs), **fixed}
        variants += [
            Configuration(
                f"shrink {name} {dtype}",
                shrink_kernel,
                numbers | {"x": dtype},
                sizes | {"INPUTS": inputs, "DEPTH": DEPTH},
                {"num_warps": 2},
                spills=dtype == "fp32",  # on gfx1201
            ),
            Configuration(
                f"expand {name} {dtype}",
                expand_kernel,
                numbers | {"out": dtype, "scales": "fp32"},
                sizes | {"OUTPUTS": outputs, "PARTS": PARTS, "COLUMNS": COLUMNS},
                spills=False,
            ),
        ]
    return variants
