"""Qwen3: no bias, but normalised heads of q and k."""

from dataclasses import replace

from typing_extensions import override

from pagewire.services.executor.models.config_json import Positive
from pagewire.services.executor.models.families.qwen2 import QwenConfig
from pagewire.services.executor.models.spec import DecoderSpec, HeadNorm


class Qwen3Config(QwenConfig, frozen=True, kw_only=True):
    """config.json of Qwen3."""

    head_dim: Positive | None = 128

    @override
    def spec(self) -> DecoderSpec:
        return replace(QwenConfig.spec(self), head_norm=HeadNorm.EACH)
