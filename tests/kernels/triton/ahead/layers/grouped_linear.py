"""The variants of `kernels/triton/layers/grouped_linear.py` that devices launch."""

from pagewire.kernels.triton.layers.grouped_linear import COLUMNS, DEPTH, grouped_linear_kernel
from pagewire.kernels.triton.layers.moe_routing import ROWS
from tests.kernels.triton.ahead.configuration import Configuration


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
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
