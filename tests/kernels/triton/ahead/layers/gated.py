"""The variants of `kernels/triton/layers/gated.py` that devices launch."""

from pagewire.kernels.activation import Activation
from pagewire.kernels.triton.layers.gated import BLOCK, gated_kernel
from tests.kernels.triton.ahead.configuration import Configuration


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    variants = [(size, "bf16", Activation.SILU) for size in (768, 1408, 3072, 5632, 7168, 14336, 17408)]
    variants += [
        (14336, "fp32", Activation.SILU),
        (9216, "bf16", Activation.GELU_TANH),
        (9216, "bf16", Activation.GELU),
    ]
    return [
        Configuration(
            f"{size} {dtype} {kind.name.lower()}",
            gated_kernel,
            {"out": dtype, "x": dtype},
            {"SIZE": size, "BLOCK": BLOCK, "ACTIVATION": int(kind)},
        )
        for size, dtype, kind in variants
    ]
