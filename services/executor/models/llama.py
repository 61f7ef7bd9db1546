"""Llama 1 to 3, and all models that are published in the format of Llama."""

from pagewire.services.executor.models.decoder import DecoderConfig


class LlamaConfig(DecoderConfig, frozen=True, kw_only=True):
    """config.json of Llama: the decoder's defaults."""
