"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, biases everywhere."""

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.config_json import Common, Positive
from pagewire.services.executor.models.families.llama import ACTIVATIONS, ActivationName
from pagewire.services.executor.models.spec import DecoderSpec, LayerSpec, Norm, Storage

NAMES = {
    "model": "transformer",
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "layers": "h",
    "attention_in": "ln_1",
    "self_attn": "attn",
    "qkv_proj": "c_attn",
    "o_proj": "c_proj",
    "mlp_in": "ln_2",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
    "norm": "ln_f",
}


class GPT2Config(Common, frozen=True, kw_only=True):
    """config.json of GPT-2."""

    vocab_size: Positive
    n_positions: Positive
    n_embd: Positive
    n_layer: Positive
    n_head: Positive
    n_inner: Positive | None = None
    activation_function: ActivationName = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    """Whether the scores of layer i are divided by i + 1."""
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError("n_embd is no multiple of n_head")
        if self.add_cross_attention:
            raise ValueError("attention to an encoder is not supported")

    def _attention(self, layer: int) -> Attention:
        head_size = self.n_embd // self.n_head
        scale = head_size**-0.5 if self.scale_attn_weights else 1.0
        by = layer + 1 if self.scale_attn_by_inverse_layer_idx else 1
        return Attention(self.n_head, self.n_head, head_size, scale / by)

    def spec(self) -> DecoderSpec:
        """Returns the model's description."""
        return DecoderSpec(
            vocab_size=self.vocab_size,
            width=self.n_embd,
            inner=self.n_inner or 4 * self.n_embd,
            layers=tuple(LayerSpec(self._attention(layer), rope=None) for layer in range(self.n_layer)),
            eps=self.layer_norm_epsilon,
            tied=self.tie_word_embeddings,
            norm=Norm.LAYER,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            gated=False,
            activation=ACTIVATIONS[self.activation_function],
            learned_positions=self.n_positions,
            storage=Storage.TRANSPOSED,
            names=NAMES,
        )
