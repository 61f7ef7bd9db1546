"""The variants of `kernels/triton/attention/rotary_cache.py` that devices launch."""

import triton

from pagewire.kernels.triton.attention.rotary_cache import Rotary, rotary_cache_kernel, warps
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.gpus import parts_with


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    variants = []
    for name, layer, dtype, cache, normed in (
        ("llama-3-8b", Rotary(32, 8, 128, 128), "bf16", "bf16", False),
        ("llama-3-8b fp8 cache", Rotary(32, 8, 128, 128), "bf16", "fp8e4nv", False),
        ("llama-3-8b fp32", Rotary(32, 8, 128, 128), "fp32", "fp32", False),
        ("llama-3-70b on 4 GPUs", Rotary(16, 2, 128, 128), "bf16", "bf16", False),
        ("qwen3-14b", Rotary(40, 8, 128, 128), "bf16", "bf16", True),
        ("qwen3-0.6b", Rotary(16, 8, 128, 128), "bf16", "bf16", True),
        ("qwen3-30b-a3b", Rotary(32, 4, 128, 128), "bf16", "bf16", True),
        ("qwen3-30b-a3b on 2 GPUs", Rotary(16, 2, 128, 128), "bf16", "bf16", True),
        ("qwen1.5-moe-a2.7b", Rotary(16, 16, 128, 128), "bf16", "bf16", False),
        ("phi-2", Rotary(32, 32, 80, 32), "bf16", "bf16", False),
        ("opt-125m", Rotary(12, 12, 64, 0), "bf16", "bf16", False),
    ):
        group = layer.heads // layer.kv_heads
        tensors = {"query": dtype, "packed": dtype, "key_cache": cache, "value_cache": cache}
        norms: dict[str, object] = {} if normed else {"query_weight": None, "key_weight": None}
        variants.append(
            Configuration(
                name=name,
                kernel=rotary_cache_kernel,
                tensors={
                    **tensors,
                    "positions": "i32",
                    "places": "i64",
                    "table": "fp32",
                    **({"query_weight": "fp32", "key_weight": "fp32"} if normed else {}),
                },
                constants={
                    **norms,
                    "KV_HEADS": layer.kv_heads,
                    "GROUP": group,
                    "HEAD_SIZE": layer.head_size,
                    "ROTARY": layer.rotary,
                    "BLOCK_SIZE": 16,
                    "LARGEST": 448.0 if cache == "fp8e4nv" else 0.0,
                    "LANES": triton.next_power_of_2(group),
                    "PADDED": triton.next_power_of_2(layer.head_size),
                },
                options={"num_warps": warps(group)},
                parts=parts_with(cache),
            )
        )
    return variants
