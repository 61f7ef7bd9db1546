"""Llama 1 to 3, and all models that are published in the format of Llama. Similar families override some settings."""

from typing import Any, Literal

from pagewire.kernels.activation import Activation
from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.config_json import Common, Positive
from pagewire.services.executor.models.rope import Rope, read_rope
from pagewire.services.executor.models.spec import DecoderSpec, ExpertsSpec, LayerSpec

ActivationName = Literal["silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"]
ACTIVATIONS: dict[ActivationName, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
"""Activations by their names in config.json."""


class LlamaConfig(Common, frozen=True, kw_only=True):
    """config.json of Llama."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Positive
    hidden_act: ActivationName = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size is no multiple of num_attention_heads")
        if self.num_attention_heads % self.kv_heads:
            raise ValueError("num_attention_heads is no multiple of num_key_value_heads")
        if self.head_size % 2:
            raise ValueError(f"heads of an odd size ({self.head_size}) cannot be rotated")

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; by default the number of query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Dimension of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope(self) -> Rope:
        """The rotation of all layers without one of their own."""
        scaling = self.rope_parameters or self.rope_scaling
        return read_rope(scaling, self.rope_theta, self.max_position_embeddings)

    @property
    def windows(self) -> tuple[int, ...]:
        """Per layer, number of positions that a query sees, its own included; 0: all."""
        return (0,) * self.num_hidden_layers

    def ropes(self) -> tuple[Rope | None, ...]:
        """Returns the rotation of each layer; None: there is none."""
        return (self.rope,) * self.num_hidden_layers

    def experts(self) -> tuple[ExpertsSpec | None, ...]:
        """Returns the mixture of experts of each layer; None: the layer is dense."""
        return (None,) * self.num_hidden_layers

    def attention(self, window: int) -> Attention:
        """Returns the attention of a layer with this window."""
        return Attention(self.num_attention_heads, self.kv_heads, self.head_size, self.head_size**-0.5, window)

    def spec(self) -> DecoderSpec:
        """Returns the model's description."""
        parts = zip(self.windows, self.ropes(), self.experts(), strict=True)
        return DecoderSpec(
            vocab_size=self.vocab_size,
            width=self.hidden_size,
            inner=self.intermediate_size,
            layers=tuple(LayerSpec(self.attention(window), rope, experts) for window, rope, experts in parts),
            eps=self.rms_norm_eps,
            tied=self.tie_word_embeddings,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            activation=ACTIVATIONS[self.hidden_act],
        )
