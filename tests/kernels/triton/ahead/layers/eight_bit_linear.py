"""The variants of `kernels/triton/layers/eight_bit_linear.py` that devices launch."""

from pagewire.kernels.triton.layers.eight_bit_linear import eight_bit_linear_kernel, tile_of, tiles
from pagewire.kernels.triton.layers.split_inputs import splits_of
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.gpus import parts_with


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch: a product of Llama-3-8B in each format."""
    variants = []
    for name, rows, stored, group in (
        ("int8, 1 row", 1, "i8", 4096),
        ("int8, 512 rows", 512, "i8", 4096),
        ("fp8, 64 rows", 64, "fp8e4nv", 4096),
        ("fp8 blocks of 128, 1 row", 1, "fp8e4nv", 128),
        ("fp8 blocks of 128, 512 rows", 512, "fp8e4nv", 128),
    ):
        block_m, block_n, warps, stages = tiles(rows)
        tensors = {"out": "bf16", "x": stored, "weights": stored, "counters": "i32"}
        tensors |= dict.fromkeys(("x_scales", "scales", "partial"), "fp32")
        constants = {
            "bias": None,
            "OUTPUTS": 6144,
            "INPUTS": 4096,
            "GROUP": group,
            "INTEGERS": stored == "i8",
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "TILE": tile_of(group),
            "SPLITS": splits_of(rows, block_m, 6144, 4096 // tile_of(group)),
        }
        options = {"num_warps": warps, "num_stages": stages}
        kernel, parts = eight_bit_linear_kernel, parts_with(stored)
        variants.append(Configuration(name, kernel, tensors, constants, options, spills=False, parts=parts))
    return variants
