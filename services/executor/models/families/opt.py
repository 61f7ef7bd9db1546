"""OPT (Zhang et al., 2022): learned positions, LayerNorm, biases everywhere."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.config_json import Common, Positive
from pagewire.services.executor.models.heads import HeadCut, cut_heads
from pagewire.services.executor.models.layers import PackedLinear, embedding
from pagewire.services.executor.models.model import AttentionFn, CausalLM, ModelCut, ModelSpec
from pagewire.services.executor.models.shard import ALONE, Collectives, Shard, Slices, Units, VocabularyPart, cut_inner

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

    @property
    def attention(self) -> Attention:
        """The attention of a layer."""
        size = self.hidden_size // self.num_attention_heads
        return Attention(self.num_attention_heads, self.num_attention_heads, size, size**-0.5)

    def layer_norm(self) -> nn.LayerNorm:
        """Returns a new LayerNorm of the hidden states."""
        return nn.LayerNorm(self.hidden_size, elementwise_affine=self.layer_norm_elementwise_affine)


@dataclass(frozen=True, slots=True)
class OptCut(ModelCut):
    """A rank's part of OPT."""

    config: OPTConfig
    shard: Shard
    units: Units

    @property
    def heads(self) -> HeadCut:
        """The heads of the rank."""
        return cut_heads(self.config.attention, self.shard, self.units)

    @property
    def inner(self) -> range:
        """Inner features of the rank."""
        return cut_inner(self.config.ffn_dim, self.shard, self.units)

    @override
    def of_rank(self, rank: int) -> "OptCut":
        return replace(self, shard=replace(self.shard, rank=rank))

    @override
    def held(self, parameter: str) -> Slices:
        module, _, kind = parameter.rpartition(".")
        heads = self.heads
        match module.rpartition(".")[2]:
            case "embed_tokens" | "lm_head":
                return {0: (self.shard.part(self.config.vocab_size, self.units.outputs),)}
            case "qkv_proj":
                return {0: heads.packed}
            case "out_proj" if kind == "weight":
                return {1: (heads.output_features,)}
            case "fc1":
                return {0: (self.inner,)}
            case "fc2" if kind == "weight":
                return {1: (self.inner,)}
            case _:
                return {}

    @override
    def build(self, collectives: Collectives) -> "OPT":
        return OPT(self.config, self, collectives)


class OptAttention(nn.Module):
    """The multi-head attention of a layer."""

    def __init__(self, config: OPTConfig, layer: int, part: OptCut) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.attention.head_size
        width, own = config.hidden_size, len(part.heads.queries) * self.head_dim
        self.qkv_proj = PackedLinear(width, dict.fromkeys(("q_proj", "k_proj", "v_proj"), own), config.enable_bias)
        self.out_proj = nn.Linear(own, width, bias=config.enable_bias and part.shard.rank == 0)

    def forward(self, x: Tensor, attend: AttentionFn) -> Tensor:
        """[T, D] -> [T, D]; of several ranks, each returns its summand."""
        q, k, v = self.qkv_proj(x).view(len(x), -1, self.head_dim).chunk(3, dim=1)
        out: Tensor = self.out_proj(attend(self.layer, q, k, v).flatten(1))
        return out


class Layer(nn.Module):
    """One block of the transformer."""

    def __init__(self, config: OPTConfig, layer: int, part: OptCut, collectives: Collectives | None) -> None:
        super().__init__()
        self.norm_first = config.do_layer_norm_before
        self.activation = ACTIVATIONS[config.activation_function]
        self.collectives = collectives
        self.self_attn = OptAttention(config, layer, part)
        self.self_attn_layer_norm = config.layer_norm()
        inner = len(part.inner)
        self.fc1 = nn.Linear(config.hidden_size, inner, bias=config.enable_bias)
        self.fc2 = nn.Linear(inner, config.hidden_size, bias=config.enable_bias and part.shard.rank == 0)
        self.final_layer_norm = config.layer_norm()

    def forward(self, x: Tensor, attend: AttentionFn) -> Tensor:
        """[T, D] -> [T, D]."""
        if self.norm_first:
            x = x + self._of_all_ranks(self.self_attn(self.self_attn_layer_norm(x), attend))
            return x + self._feed_forward(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self._of_all_ranks(self.self_attn(x, attend)))
        out: Tensor = self.final_layer_norm(x + self._feed_forward(x))
        return out

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self._of_all_ranks(self.fc2(self.activation(self.fc1(x))))

    def _of_all_ranks(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' summands [T, D]."""
        return x if self.collectives is None else self.collectives.all_reduce(x)


class Decoder(nn.Module):
    """The stack of blocks between embedding and output."""

    def __init__(
        self,
        config: OPTConfig,
        part: OptCut,
        vocabulary: VocabularyPart | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        super().__init__()
        width, outer = config.hidden_size, config.embedding_width
        self.vocabulary = vocabulary
        self.embed_tokens = embedding(config.vocab_size if vocabulary is None else len(vocabulary.rows), outer)
        self.embed_positions = embedding(config.max_position_embeddings + POSITION_OFFSET, width)
        self.project_in = nn.Linear(outer, width, bias=False) if outer != width else nn.Identity()
        self.project_out = nn.Linear(width, outer, bias=False) if outer != width else nn.Identity()
        normed = config.do_layer_norm_before and not config.remove_final_layer_norm
        self.final_layer_norm = config.layer_norm() if normed else nn.Identity()
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(Layer(config, layer, part, collectives) for layer in layers)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """[T], [T] -> [T, D]."""
        if self.vocabulary is None:
            x = self.embed_tokens(token_ids)
        else:
            x = self.vocabulary.look_up(self.embed_tokens, token_ids)
        x = self.project_in(x) + self.embed_positions(positions + POSITION_OFFSET)
        for layer in self.layers:
            x = layer(x, attend)
        out: Tensor = self.project_out(self.final_layer_norm(x))
        return out


class OPT(CausalLM):
    """The OPT model. Its checkpoint has the layers under `model.decoder`."""

    def __init__(self, config: OPTConfig, part: OptCut | None = None, collectives: Collectives | None = None) -> None:
        """With `collectives`, the model is the rank's `part`."""
        own = part or OptCut(config, ALONE, Units())
        vocabulary = None
        if collectives is not None:
            shard, unit = own.shard, own.units.outputs
            vocabulary = VocabularyPart.of(config.vocab_size, shard, unit, collectives)
        spec = ModelSpec(config.vocab_size, (own.heads.attention,) * config.num_hidden_layers)
        super().__init__(spec, config.embedding_width, config.tie_word_embeddings, vocabulary)
        self.config = config
        self.model = nn.ModuleDict({"decoder": Decoder(config, own, vocabulary, collectives)})

    @override
    def cut(self, shard: Shard, units: Units) -> OptCut:
        return OptCut(self.config, shard, units)

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
