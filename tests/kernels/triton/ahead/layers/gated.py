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
    every = [
        Configuration(
            f"{size} {dtype} {kind.name.lower()}",
            gated_kernel,
            {"out": dtype, "x": dtype},
            {"SIZE": size, "BLOCK": BLOCK, "ACTIVATION": int(kind), "rows": None},
        )
        for size, dtype, kind in variants
    ]
    sizes = {"SIZE": 768, "BLOCK": BLOCK, "ACTIVATION": int(Activation.SILU)}
    tensors = {"out": "bf16", "x": "bf16", "rows": "i32"}
    return [*every, Configuration("768 bf16 silu, experts of one of 2 GPUs", gated_kernel, tensors, sizes)]
