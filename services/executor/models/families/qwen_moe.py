"""Qwen2-MoE, with a shared expert, Qwen3-MoE, without one, and OLMoE, which normalises all heads together."""

from dataclasses import replace
from typing import Annotated

import msgspec

from pagewire.services.executor.models.config_json import Positive
from pagewire.services.executor.models.families.llama import LlamaConfig
from pagewire.services.executor.models.families.qwen2 import QwenConfig
from pagewire.services.executor.models.families.sliding import Kind
from pagewire.services.executor.models.spec import DecoderSpec, ExpertsSpec, HeadNorm


class QwenMoeConfig(QwenConfig, frozen=True, kw_only=True):
    """The common fields of config.json of Qwen2-MoE and Qwen3-MoE."""

    num_experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_local_experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The same, as transformers 5 writes it."""
    num_experts_per_tok: Positive
    moe_intermediate_size: Positive
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    """Every layer whose number, counted from 1, is a multiple of it has experts."""
    mlp_only_layers: tuple[int, ...] | None = None
    """Layers without experts all the same."""

    @property
    def shared(self) -> int:
        """See `ExpertsSpec.shared`."""
        return 0

    def experts(self) -> tuple[ExpertsSpec | None, ...]:
        """See `LlamaConfig.experts`."""
        count = self.num_experts or self.num_local_experts
        if not count:
            return (None,) * self.num_hidden_layers
        sizes = count, self.num_experts_per_tok, self.moe_intermediate_size
        each, dense = ExpertsSpec(*sizes, self.norm_topk_prob, self.shared), set(self.mlp_only_layers or ())
        return tuple(
            None if layer in dense or (layer + 1) % self.decoder_sparse_step else each
            for layer in range(self.num_hidden_layers)
        )


class Qwen2MoeConfig(QwenMoeConfig, frozen=True, kw_only=True):
    """config.json of Qwen2-MoE."""

    shared_expert_intermediate_size: Positive
    qkv_bias: bool = True

    @property
    def shared(self) -> int:
        """See `ExpertsSpec.shared`."""
        return self.shared_expert_intermediate_size

    def default_kind(self, layer: int) -> Kind:
        """See `SlidingConfig.default_kind`: every other layer below `max_window_layers`."""
        return "sliding_attention" if layer % 2 == 0 and layer < self.max_window_layers else "full_attention"

    def spec(self) -> DecoderSpec:
        """See `LlamaConfig.spec`."""
        return replace(QwenMoeConfig.spec(self), qkv_bias=self.qkv_bias, output_bias=False)


class Qwen3MoeConfig(QwenMoeConfig, frozen=True, kw_only=True):
    """config.json of Qwen3-MoE."""

    def default_kind(self, layer: int) -> Kind:
        """See `SlidingConfig.default_kind`: the window is that of every layer."""
        return "sliding_attention"

    def spec(self) -> DecoderSpec:
        """See `LlamaConfig.spec`."""
        return replace(QwenMoeConfig.spec(self), head_norm=HeadNorm.EACH)


class OlmoeConfig(LlamaConfig, frozen=True, kw_only=True):
    """config.json of OLMoE."""

    rms_norm_eps: float = 1e-5
    num_experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_local_experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_experts_per_tok: Positive
    norm_topk_prob: bool = False
    clip_qkv: None = None
    """Largest absolute value of queries, keys and values: not supported."""

    def experts(self) -> tuple[ExpertsSpec | None, ...]:
        """See `LlamaConfig.experts`."""
        count = self.num_experts or self.num_local_experts
        each = ExpertsSpec(count, self.num_experts_per_tok, self.intermediate_size, self.norm_topk_prob)
        return (each,) * self.num_hidden_layers

    def spec(self) -> DecoderSpec:
        """See `LlamaConfig.spec`."""
        return replace(LlamaConfig.spec(self), head_norm=HeadNorm.TOGETHER)
