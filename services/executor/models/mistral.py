"""Mistral: Llama with one sliding window on every layer."""

from pagewire.services.executor.models.config import Positive
from pagewire.services.executor.models.decoder import DecoderConfig


class MistralConfig(DecoderConfig, frozen=True, kw_only=True):
    """config.json of Mistral."""

    sliding_window: Positive | None = None

    @property
    def windows(self) -> tuple[int, ...]:
        """See `Attention.window`, per layer: the same window for every layer, or none."""
        return (self.sliding_window or 0,) * self.num_hidden_layers
