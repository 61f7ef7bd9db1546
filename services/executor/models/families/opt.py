"""OPT (Zhang et al., 2022): learned positions, LayerNorm, biases everywhere."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from pagewire.services.executor.models.config_json import Common, Positive
from pagewire.services.executor.models.layers import PackedLinear, embedding
from pagewire.services.executor.models.model import AttentionFn, CausalLM, ModelSpec

POSITION_OFFSET = 2
"""Position 0 is row 2 of the table: the first rows were reserved for padding."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class OPTConfig(Common, frozen=True, kw_only=True):
    """config.json of OPT."""

    vocab_size: Positive
    hidden_size: Positive
    ffn_dim: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    max_position_embeddings: Positive
    word_embed_proj_dim: Positive | None = None
    """Width of the embeddings if it differs from `hidden_size`."""
    do_layer_norm_before: bool = True
    """False: the norm follows the residual sum, as in the original transformer, and there is no final norm."""
    remove_final_layer_norm: bool = msgspec.field(default=False, name="_remove_final_layer_norm")
    layer_norm_elementwise_affine: bool = True
    enable_bias: bool = True
    activation_function: Literal["relu", "gelu"] = "relu"
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size is no multiple of num_attention_heads")

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.word_embed_proj_dim or self.hidden_size

    def layer_norm(self) -> nn.LayerNorm:
        """Returns a new LayerNorm of the hidden states."""
        return nn.LayerNorm(self.hidden_size, elementwise_affine=self.layer_norm_elementwise_affine)


class OptAttention(nn.Module):
    """The multi-head attention of a layer."""

    def __init__(self, config: OPTConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.layer, self.head_dim = layer, width // config.num_attention_heads
        self.qkv_proj = PackedLinear(width, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), config.enable_bias)
        self.out_proj = nn.Linear(width, width, bias=config.enable_bias)

    def forward(self, x: Tensor, attend: AttentionFn) -> Tensor:
        """[T, D] -> [T, D]."""
        q, k, v = self.qkv_proj(x).view(len(x), -1, self.head_dim).chunk(3, dim=1)
        out: Tensor = self.out_proj(attend(self.layer, q, k, v).flatten(1))
        return out


class Layer(nn.Module):
    """One block of the transformer."""

    def __init__(self, config: OPTConfig, layer: int) -> None:
        super().__init__()
        self.norm_first = config.do_layer_norm_before
        self.activation = ACTIVATIONS[config.activation_function]
        self.self_attn = OptAttention(config, layer)
        self.self_attn_layer_norm = config.layer_norm()
        self.fc1 = nn.Linear(config.hidden_size, config.ffn_dim, bias=config.enable_bias)
        self.fc2 = nn.Linear(config.ffn_dim, config.hidden_size, bias=config.enable_bias)
        self.final_layer_norm = config.layer_norm()

    def forward(self, x: Tensor, attend: AttentionFn) -> Tensor:
        """[T, D] -> [T, D]."""
        if self.norm_first:
            x = x + self.self_attn(self.self_attn_layer_norm(x), attend)
            return x + self._feed_forward(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, attend))
        out: Tensor = self.final_layer_norm(x + self._feed_forward(x))
        return out

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out


class Decoder(nn.Module):
    """The stack of blocks between embedding and output."""

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        width, outer = config.hidden_size, config.embedding_width
        self.embed_tokens = embedding(config.vocab_size, outer)
        self.embed_positions = embedding(config.max_position_embeddings + POSITION_OFFSET, width)
        self.project_in = nn.Linear(outer, width, bias=False) if outer != width else nn.Identity()
        self.project_out = nn.Linear(width, outer, bias=False) if outer != width else nn.Identity()
        normed = config.do_layer_norm_before and not config.remove_final_layer_norm
        self.final_layer_norm = config.layer_norm() if normed else nn.Identity()
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """[T], [T] -> [T, D]."""
        x = self.project_in(self.embed_tokens(token_ids)) + self.embed_positions(positions + POSITION_OFFSET)
        for layer in self.layers:
            x = layer(x, attend)
        out: Tensor = self.project_out(self.final_layer_norm(x))
        return out


class OPT(CausalLM):
    """The OPT model. Its checkpoint has the layers under `model.decoder`."""

    def __init__(self, config: OPTConfig) -> None:
        heads = config.num_attention_heads
        windows = (0,) * config.num_hidden_layers
        sizes = heads, heads, config.hidden_size // heads
        spec = ModelSpec.of_equal_heads(config.vocab_size, *sizes, windows)
        super().__init__(spec, config.embedding_width, config.tie_word_embeddings)
        self.model = nn.ModuleDict({"decoder": Decoder(config)})

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        decoder: Any = self.model["decoder"]
        weight: Tensor = decoder.embed_tokens.weight
        return weight

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        out: Tensor = self.model["decoder"](token_ids, positions, attend)
        return out
