"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and sliding windows on some layers."""

from dataclasses import replace

from typing_extensions import override

from pagewire.services.executor.models.families.sliding import Kind, SlidingConfig
from pagewire.services.executor.models.spec import DecoderSpec


class QwenConfig(SlidingConfig, frozen=True, kw_only=True):
    """The common fields of config.json of Qwen2 and Qwen3."""

    use_sliding_window: bool = False
    max_window_layers: int = 28
    """Index of the first layer with a window, if there are no `layer_types`."""

    @override
    def default_kind(self, layer: int) -> Kind:
        return "sliding_attention" if layer >= self.max_window_layers else "full_attention"

    @property
    @override
    def windows(self) -> tuple[int, ...]:
        """The window of each layer: sliding layers have one if `use_sliding_window` is set."""
        return self.sliding() if self.use_sliding_window else (0,) * self.num_hidden_layers


class Qwen2Config(QwenConfig, frozen=True, kw_only=True):
    """config.json of Qwen2."""

    @override
    def spec(self) -> DecoderSpec:
        """Returns the decoder, with the bias of queries, keys and values, which config.json does not state."""
        return replace(QwenConfig.spec(self), qkv_bias=True, output_bias=False)
