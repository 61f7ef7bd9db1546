"""The variants of `kernels/triton/sampling/sampler.py` that devices launch."""

import triton

from pagewire.kernels.triton.sampling.sampler import TILE, WARPS, sample_kernel, tile_sums_kernel
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.tensors import SAMPLING_TENSORS, VOCABULARIES


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    variants = []
    tensors = {**SAMPLING_TENSORS, "tiles": "fp32", "logits": "fp32", "slots": "i32", "ends": "i32", "tokens": "i32"}
    for vocabulary in VOCABULARIES:
        count = triton.cdiv(vocabulary, TILE)
        sizes = {"VOCABULARY": vocabulary, "TILES": count, "TILE": TILE}
        options, name = {"num_warps": WARPS}, f"{vocabulary} tokens"
        picked = {**sizes, "PADDED": triton.next_power_of_2(count)}
        variants.append(Configuration(f"sums {name}", tile_sums_kernel, tensors, sizes, options, spills=False))
        variants.append(Configuration(f"sample {name}", sample_kernel, tensors, picked, options, spills=False))
    return variants
