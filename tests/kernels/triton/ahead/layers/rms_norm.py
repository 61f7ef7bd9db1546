"""The variants of `kernels/triton/layers/rms_norm.py` that devices launch."""

import triton

from pagewire.kernels.triton.layers.rms_norm import rms_norm_kernel, warps
from tests.kernels.triton.ahead.configuration import Configuration


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    variants = []
    for size, dtype in ((1024, "bf16"), (2048, "bf16"), (4096, "bf16"), (5120, "bf16"), (8192, "bf16"), (4096, "fp32")):
        padded = triton.next_power_of_2(size)
        for fused in (False, True):
            tensors = {"out": dtype, "x": dtype, "weight": dtype, **({"residual": dtype} if fused else {})}
            constants = {"SIZE": size, "PADDED": padded, **({} if fused else {"residual": None})}
            name = f"{size} {dtype}{' residual' if fused else ''}"
            variants.append(Configuration(name, rms_norm_kernel, tensors, constants, {"num_warps": warps(padded)}))
    return variants
