"""Checks an unpacked vLLM on the GPU: its imports, and the two kernels that every layer runs, against PyTorch's."""

import sys
from typing import Any

import torch
import vllm
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.vllm_flash_attn import flash_attn_interface as flash

LIMIT = 0.02
"""Largest difference of the attention from PyTorch's."""


def main() -> int:
    """Returns 1 if a kernel gives other numbers than PyTorch."""
    print("vllm", vllm.__version__, "torch", torch.__version__, type(current_platform).__name__)
    print("FlashAttention 3:", flash.FA3_AVAILABLE, flash.FA3_UNAVAILABLE_REASON)
    queries, keys, values = _normal(32), _normal(8), _normal(8)
    pool = torch.zeros(2, 4, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    one = torch.ones(1, device="cuda")
    ops.reshape_and_cache_flash(keys, values, *pool, torch.arange(64, device="cuda"), "auto", one, one)
    exact = bool((pool[0].flatten(0, 1) == keys).all() and (pool[1].flatten(0, 1) == values).all())
    context: Any = {"max_seqlen_q": 64, "max_seqlen_k": 64, "cu_seqlens_q": _integers(0, 64)}
    context |= {"seqused_k": _integers(64), "block_table": _integers(0, 1, 2, 3)[None], "causal": True}
    attended = flash.flash_attn_varlen_func(queries, *pool, **context, fa_version=3)
    q, k, v = (each.transpose(0, 1)[None] for each in (queries, keys, values))
    reference = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    difference = float((attended - reference[0].transpose(0, 1)).abs().max())
    print("cache kernel exact:", exact, "attention differs by", difference)
    return 0 if exact and difference < LIMIT else 1


def _normal(heads: int) -> torch.Tensor:
    return torch.randn(64, heads, 128, dtype=torch.bfloat16, device="cuda")


def _integers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


if __name__ == "__main__":
    sys.exit(main())
