"""Llama 1 to 3, and every model that was published in its format."""

from pagewire.services.executor.models.decoder import DecoderConfig


class LlamaConfig(DecoderConfig, frozen=True, kw_only=True):
    """The plain form of the decoder."""
