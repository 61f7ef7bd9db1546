"""Qwen3: no bias, but normalised heads of q and k."""

from pagewire.services.executor.models.config import Positive
from pagewire.services.executor.models.qwen2 import QwenConfig


class Qwen3Config(QwenConfig, frozen=True, kw_only=True):
    """config.json of Qwen3."""

    head_dim: Positive | None = 128

    @property
    def qk_norm(self) -> bool:
        """Always true."""
        return True
