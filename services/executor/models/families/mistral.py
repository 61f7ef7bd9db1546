"""Mistral: Llama with one sliding window on every layer. Mixtral: Mistral with a mixture of experts."""

from dataclasses import replace

from typing_extensions import override

from pagewire.services.executor.models.config_json import Positive
from pagewire.services.executor.models.families.llama import LlamaConfig
from pagewire.services.executor.models.spec import DecoderSpec, ExpertsSpec


class MistralConfig(LlamaConfig, frozen=True, kw_only=True):
    """config.json of Mistral."""

    sliding_window: Positive | None = 4096

    @property
    @override
    def windows(self) -> tuple[int, ...]:
        return (self.sliding_window or 0,) * self.num_hidden_layers


class MixtralConfig(MistralConfig, frozen=True, kw_only=True):
    """config.json of Mixtral."""

    sliding_window: Positive | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    num_local_experts: Positive = 8
    num_experts_per_tok: Positive = 2

    @override
    def experts(self) -> tuple[ExpertsSpec | None, ...]:
        each = ExpertsSpec(self.num_local_experts, self.num_experts_per_tok, self.intermediate_size, normalized=True)
        return (each,) * self.num_hidden_layers

    @override
    def spec(self) -> DecoderSpec:
        names = {"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        return replace(MistralConfig.spec(self), names=names)
