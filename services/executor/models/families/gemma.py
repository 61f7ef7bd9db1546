"""Gemma: scaled embeddings, norms whose weights lack a one. Gemma 2 and 3 also normalise what their layers add."""

from dataclasses import replace

from typing_extensions import override

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.config_json import Positive
from pagewire.services.executor.models.families.llama import ACTIVATIONS, ActivationName, LlamaConfig
from pagewire.services.executor.models.families.sliding import Kind, SlidingConfig, ropes_by_kind
from pagewire.services.executor.models.rope import Rope
from pagewire.services.executor.models.spec import DecoderSpec, HeadNorm, Norm, Placement

TANH: ActivationName = "gelu_pytorch_tanh"


def _gemma(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, norm=Norm.RMS_PLUS_ONE, embedding_scale=spec.width**0.5)


class GemmaConfig(LlamaConfig, frozen=True, kw_only=True):
    """config.json of Gemma."""

    head_dim: Positive | None = 256
    tie_word_embeddings: bool = True

    @override
    def spec(self) -> DecoderSpec:
        """Returns the decoder; "gelu" in config.json means its approximation by tanh."""
        return replace(_gemma(LlamaConfig.spec(self)), activation=ACTIVATIONS[TANH])


class Gemma2Config(SlidingConfig, frozen=True, kw_only=True):
    """config.json of Gemma 2."""

    head_dim: Positive | None = 256
    hidden_activation: ActivationName = TANH
    query_pre_attn_scalar: float = 256.0
    """Scores are divided by its square root."""
    sliding_window: Positive | None = 4096
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    tie_word_embeddings: bool = True
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        SlidingConfig.__post_init__(self)
        if self.use_bidirectional_attention:
            raise ValueError("attention to later positions is not supported")

    @override
    def default_kind(self, layer: int) -> Kind:
        return "full_attention" if layer % 2 else "sliding_attention"

    @override
    def attention(self, window: int) -> Attention:
        scale, cap = self.query_pre_attn_scalar**-0.5, self.attn_logit_softcapping or 0.0
        return Attention(self.num_attention_heads, self.kv_heads, self.head_size, scale, window, soft_cap=cap)

    @override
    def spec(self) -> DecoderSpec:
        return replace(
            _gemma(SlidingConfig.spec(self)),
            placement=Placement.AROUND,
            activation=ACTIVATIONS[self.hidden_activation],
            logit_cap=self.final_logit_softcapping or 0.0,
        )


class Gemma3Config(Gemma2Config, frozen=True, kw_only=True):
    """config.json of the text part of Gemma 3."""

    vocab_size: Positive = 262208
    max_position_embeddings: Positive = 131072
    num_attention_heads: Positive = 8
    num_key_value_heads: Positive | None = 4
    rope_theta: float = 1e6
    rope_local_base_freq: float = 10000.0
    """Base of the wavelengths of layers with a window."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window_pattern: Positive = 6
    """Every layer whose number, counted from 1, is a multiple of it has no window."""

    @override
    def default_kind(self, layer: int) -> Kind:
        return "sliding_attention" if (layer + 1) % self.sliding_window_pattern else "full_attention"

    @override
    def ropes(self) -> tuple[Rope | None, ...]:
        return ropes_by_kind(self, self.rope_local_base_freq)

    @override
    def spec(self) -> DecoderSpec:
        return replace(Gemma2Config.spec(self), head_norm=HeadNorm.EACH)
