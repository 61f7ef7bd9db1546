"""The variants of `kernels/triton/attention/paged_attention.py` that devices launch."""

from itertools import product

from pagewire.kernels.triton.attention.paged_attention import paged_attention_kernel, tiling
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.known_layers import SHAPES, TENSORS


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    variants = []
    for shape, wide in product(SHAPES, (True, False)):
        sizes = tiling(shape.layer, shape.itemsize, wide=wide)
        variants.append(
            Configuration(
                name=f"{shape.name}{'' if wide else ', small tiles'}",
                kernel=paged_attention_kernel,
                tensors={**TENSORS, **shape.tensors},
                constants={**shape.constants, **{key: sizes[key] for key in ("BLOCK_M", "TILE", "PADDED")}},
                options={key: size for key, size in sizes.items() if key.islower()},
                spills=False,
                parts=shape.parts(wide=wide),
            )
        )
    return variants
