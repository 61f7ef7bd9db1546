"""GPT-NeoX and Pythia (Black et al., 2022): LayerNorm, attention and feed-forward side by side."""

from typing import Any

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.config_json import Common, Positive
from pagewire.services.executor.models.families.llama import ACTIVATIONS, ActivationName
from pagewire.services.executor.models.rope import read_rope
from pagewire.services.executor.models.spec import DecoderSpec, LayerSpec, Norm, Placement, Storage

NAMES = {
    "model": "gpt_neox",
    "embed_tokens": "embed_in",
    "self_attn": "attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "final_layer_norm",
    "lm_head": "embed_out",
}


class GPTNeoXConfig(Common, frozen=True, kw_only=True):
    """config.json of GPT-NeoX."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    max_position_embeddings: Positive
    hidden_act: ActivationName = "gelu"
    layer_norm_eps: float = 1e-5
    rotary_emb_base: float = 10000.0
    rotary_pct: float = 0.25
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size is no multiple of num_attention_heads")

    def spec(self) -> DecoderSpec:
        """Returns the model's description."""
        heads = self.num_attention_heads
        head_size = self.hidden_size // heads
        parameters = {"partial_rotary_factor": self.rotary_pct, **(self.rope_parameters or self.rope_scaling or {})}
        rope = read_rope(parameters, self.rotary_emb_base, self.max_position_embeddings, partial=None)
        layer = LayerSpec(Attention(heads, heads, head_size, head_size**-0.5), rope)
        return DecoderSpec(
            vocab_size=self.vocab_size,
            width=self.hidden_size,
            inner=self.intermediate_size,
            layers=(layer,) * self.num_hidden_layers,
            eps=self.layer_norm_eps,
            tied=self.tie_word_embeddings,
            norm=Norm.LAYER,
            placement=Placement.PARALLEL if self.use_parallel_residual else Placement.BEFORE,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            mlp_bias=True,
            gated=False,
            activation=ACTIVATIONS[self.hidden_act],
            storage=Storage.BY_HEAD,
            names=NAMES,
        )
