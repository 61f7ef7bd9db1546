"""The variants of `kernels/triton/layers/moe_routing.py` that devices launch."""

import triton

from pagewire.kernels.triton.layers.moe_routing import (
    BLOCK,
    ROWS,
    bins,
    choose_kernel,
    combine_kernel,
    group_kernel,
)
from tests.kernels.triton.ahead.configuration import Configuration


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    variants = []
    grouped = {"pairs": "i32", "places": "i32", "tiles": "i32", "chosen": "i32"}
    for name, experts, count, normalized in (
        ("qwen3-30b-a3b", 128, 8, True),
        ("qwen1.5-moe-a2.7b", 60, 4, False),
        ("mixtral-8x7b", 8, 2, True),
    ):
        tensors = {"weights": "fp32", "chosen": "i32", "logits": "bf16"}
        sizes = {"EXPERTS": experts, "PADDED": triton.next_power_of_2(experts), "CHOSEN": count}
        sizes |= {"LANES": triton.next_power_of_2(count), "NORMALIZED": normalized}
        variants.append(Configuration(f"choose {name}", choose_kernel, tensors, sizes, {"num_warps": 1}))
        tensors = {"out": "bf16", "made": "bf16", "weights": "fp32", "places": "i32"}
        variants.append(Configuration(f"combine {name}", combine_kernel, tensors, {"CHOSEN": count, "BLOCK": BLOCK}))
    for name, experts in (
        ("qwen3-30b-a3b", 128),
        ("qwen3-30b-a3b, experts of one of 2 GPUs", 64),
        ("qwen1.5-moe-a2.7b", 60),
        ("mixtral-8x7b", 8),
    ):
        sizes = {"EXPERTS": experts, "PADDED": bins(experts), "ROWS": ROWS, "BLOCK": BLOCK}
        variants.append(Configuration(f"group {name}", group_kernel, grouped, sizes))
    return variants
