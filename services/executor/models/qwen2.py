"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and sliding windows on some layers."""

from typing import Literal

from pagewire.services.executor.models.config import Positive
from pagewire.services.executor.models.decoder import DecoderConfig


class QwenConfig(DecoderConfig, frozen=True, kw_only=True):
    """The common fields of config.json of Qwen2 and Qwen3."""

    use_sliding_window: bool = False
    sliding_window: Positive | None = None
    max_window_layers: int = 28
    """Index of the first layer with a window, if there are no `layer_types`."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("layer_types does not have num_hidden_layers entries")

    @property
    def windows(self) -> tuple[int, ...]:
        """See `Attention.window`, per layer: the sliding layers have a window if `use_sliding_window` is set."""
        window = self.sliding_window or 0 if self.use_sliding_window else 0
        if self.layer_types is not None:
            return tuple(window if kind == "sliding_attention" else 0 for kind in self.layer_types)
        return tuple(window if layer >= self.max_window_layers else 0 for layer in range(self.num_hidden_layers))


class Qwen2Config(QwenConfig, frozen=True, kw_only=True):
    """config.json of Qwen2."""

    @property
    def qkv_bias(self) -> bool:
        """Always true; config.json does not state it."""
        return True
