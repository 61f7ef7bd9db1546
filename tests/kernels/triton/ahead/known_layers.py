"""The attention layers of known models, for which kernels are compiled ahead of time."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.kernels.attention_layer import Attention
from pagewire.kernels.gpu_arch import is_wide
from tests.kernels.triton.ahead.gpus import parts_with


@dataclass(frozen=True, slots=True)
class KnownLayer:
    """An attention layer of a known model, for `tests.kernels.triton.ahead.compile`."""

    name: str
    layer: Attention
    dtype: str = "bf16"
    cache: str = "bf16"

    @property
    def itemsize(self) -> int:
        """Bytes per element of the query."""
        return 4 if self.dtype == "fp32" else 2

    def parts(self, *, wide: bool) -> tuple[int, ...]:
        """Returns the GPUs with large or with small tiles that have instructions for the cache's type."""
        return tuple(part for part in parts_with(self.cache) if is_wide(part) == wide)

    @property
    def tensors(self) -> Mapping[str, str]:
        """Element types of the parameters that depend on the shape."""
        return {"query": self.dtype, "out": self.dtype, "key_cache": self.cache, "value_cache": self.cache}

    @property
    def constants(self) -> Mapping[str, object]:
        """Compile-time parameters that depend on the shape."""
        layer = self.layer
        return {
            "KV_HEADS": layer.kv_heads,
            "GROUP": layer.group,
            "HEAD_SIZE": layer.head_size,
            "VALUE_SIZE": layer.value_head_size,
            "VALUE_PADDED": 1 << (layer.value_head_size - 1).bit_length(),
            "BLOCK_SIZE": 16,
            "WINDOW": layer.window,
            "CHUNK": layer.chunk,
            "sinks": None,
            "SOFT_CAP": layer.soft_cap,
        }


TENSORS = {"slots": "i32", "lengths": "i32", "cu_queries": "i32", "block_tables": "i32"}
"""Element types of the parameters that do not depend on the shape."""

SHAPES = (
    KnownLayer("llama-3-8b", Attention(32, 8, 128, 1.0)),
    KnownLayer("llama-3-8b fp16", Attention(32, 8, 128, 1.0), "fp16", "fp16"),
    KnownLayer("llama-3-8b fp32", Attention(32, 8, 128, 1.0), "fp32", "fp32"),
    KnownLayer("llama-3-8b fp8 cache", Attention(32, 8, 128, 1.0), cache="fp8e4nv"),
    KnownLayer("llama-3-70b on 4 GPUs", Attention(16, 2, 128, 1.0)),
    KnownLayer("qwen3-14b", Attention(40, 8, 128, 1.0)),
    KnownLayer("qwen3-0.6b", Attention(16, 8, 128, 1.0)),
    KnownLayer("qwen3-30b-a3b", Attention(32, 4, 128, 1.0)),
    KnownLayer("qwen1.5-moe-a2.7b", Attention(16, 16, 128, 1.0)),
    KnownLayer("opt-125m", Attention(12, 12, 64, 1.0)),
    KnownLayer("phi-2 (head 80)", Attention(32, 32, 80, 1.0)),
    KnownLayer("gemma-2-2b (window, cap)", Attention(8, 4, 256, 1.0, window=4096, soft_cap=50.0)),
    KnownLayer("gemma-2-2b fp32", Attention(8, 4, 256, 1.0, window=4096, soft_cap=50.0), "fp32", "fp32"),
    KnownLayer("falcon-7b (71 heads on one)", Attention(71, 1, 64, 1.0)),
)
