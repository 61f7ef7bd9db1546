"""The variants of `kernels/triton/layers/eight_bit_linear.py` that devices launch."""

from pagewire.kernels.triton.layers.eight_bit_linear import eight_bit_linear_kernel, tile_of, tiles
from pagewire.kernels.triton.layers.split_inputs import splits_of
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.gpus import parts_with


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch: a product of Llama-3-8B in each format."""
    return [
        variant("int8, 1 row", 1, "i8", 4096),
        variant("int8, 512 rows", 512, "i8", 4096),
        variant("fp8, 64 rows", 64, "fp8e4nv", 4096),
        variant("fp8 blocks of 128, 1 row", 1, "fp8e4nv", 128),
        variant("fp8 blocks of 128, 512 rows", 512, "fp8e4nv", 128),
    ]


def variant(name: str, rows: int, stored: str, group: int, *, outputs: int = 6144, inputs: int = 4096) -> Configuration:
    """Returns the variant of a product of `rows` rows; `stored` is Triton's name of an element of the weights."""
    block_m, block_n, warps, stages = tiles(rows)
    tensors = {"out": "bf16", "x": stored, "weights": stored, "counters": "i32"}
    tensors |= dict.fromkeys(("x_scales", "scales", "partial"), "fp32")
    constants = {
        "bias": None,
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "GROUP": group,
        "INTEGERS": stored == "i8",
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "TILE": tile_of(group),
        "SPLITS": splits_of(rows, block_m, outputs, inputs // tile_of(group)),
    }
    options = {"num_warps": warps, "num_stages": stages}
    kernel, parts = eight_bit_linear_kernel, parts_with(stored)
    return Configuration(name, kernel, tensors, constants, options, spills=False, parts=parts)
