"""Qwen2-MoE, with a shared expert, Qwen3-MoE, without one, and OLMoE, which normalises all heads together."""

from dataclasses import replace
from typing import Annotated

import msgspec
from typing_extensions import override

from pagewire.services.executor.models.config_json import Positive
from pagewire.services.executor.models.families.llama import LlamaConfig
from pagewire.services.executor.models.families.qwen2 import QwenConfig
from pagewire.services.executor.models.families.sliding import Kind
from pagewire.services.executor.models.spec import DecoderSpec, ExpertsSpec, HeadNorm


class QwenMoeConfig(QwenConfig, frozen=True, kw_only=True):
    """The common fields of config.json of Qwen2-MoE and Qwen3-MoE."""

    num_experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_local_experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Name of `num_experts` in files that transformers 5 has written."""
    num_experts_per_tok: Positive
    moe_intermediate_size: Positive
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    """Layers whose number, counted from 1, is a multiple of it have experts."""
    mlp_only_layers: tuple[int, ...] | None = None
    """Further layers without experts."""

    @property
    def shared(self) -> int:
        """Width of the expert of all tokens, as in `ExpertsSpec`."""
        return 0

    @override
    def experts(self) -> tuple[ExpertsSpec | None, ...]:
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
    @override
    def shared(self) -> int:
        return self.shared_expert_intermediate_size

    @override
    def default_kind(self, layer: int) -> Kind:
        """Returns the kind of a layer: every other one below `max_window_layers` has a window."""
        return "sliding_attention" if layer % 2 == 0 and layer < self.max_window_layers else "full_attention"

    @override
    def spec(self) -> DecoderSpec:
        return replace(QwenMoeConfig.spec(self), qkv_bias=self.qkv_bias, output_bias=False)


class Qwen3MoeConfig(QwenMoeConfig, frozen=True, kw_only=True):
    """config.json of Qwen3-MoE."""

    @override
    def default_kind(self, layer: int) -> Kind:
        """Returns the kind of a layer: all have the window."""
        return "sliding_attention"

    @override
    def spec(self) -> DecoderSpec:
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

    @override
    def experts(self) -> tuple[ExpertsSpec | None, ...]:
        count = self.num_experts or self.num_local_experts
        each = ExpertsSpec(count, self.num_experts_per_tok, self.intermediate_size, self.norm_topk_prob)
        return (each,) * self.num_hidden_layers

    @override
    def spec(self) -> DecoderSpec:
        return replace(LlamaConfig.spec(self), head_norm=HeadNorm.TOGETHER)
