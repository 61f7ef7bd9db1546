"""The transformer of Llama and of all models that `DecoderSpec` describes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from pagewire.services.executor.models.cut import Cut
from pagewire.services.executor.models.feed_forward import MLP, MixtureOfExperts
from pagewire.services.executor.models.layers import LayerNorm, PackedLinear, RMSNorm, embedding
from pagewire.services.executor.models.model import AttentionFn, CausalLM, ModelCut
from pagewire.services.executor.models.rope import Rotate, rotary_embedding
from pagewire.services.executor.models.shard import Collectives, Shard, Slices, Units, VocabularyPart
from pagewire.services.executor.models.spec import DecoderSpec, HeadNorm, LayerSpec, Norm, Placement, Storage

_BEFORE = {"attention_in": "input_layernorm", "mlp_in": "post_attention_layernorm"}
_AFTER = {"attention_out": "post_attention_layernorm", "mlp_out": "post_feedforward_layernorm"}
NAMES: Mapping[Placement, dict[str, str]] = {
    Placement.BEFORE: _BEFORE,
    Placement.PARALLEL: _BEFORE,
    Placement.AFTER: _AFTER,
    Placement.AROUND: _BEFORE | _AFTER | {"mlp_in": "pre_feedforward_layernorm"},
}
"""Names of the norms of a block in checkpoints."""


class DecoderAttention(nn.Module):
    """The grouped-query attention of a layer."""

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, index: int, collectives: Collectives | None = None) -> None:
        super().__init__()
        sizes = layer.attention
        self.layer, self.head_dim = index, sizes.head_size
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.cut, self.collectives = layer.heads, collectives
        self.head_norm = spec.head_norm
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        if spec.storage is not Storage.PARTS:
            parts = {"qkv_proj": q + 2 * kv}
        by_head = (self.heads, self.head_dim)
        self.qkv = PackedLinear(spec.width, parts, spec.qkv_bias, spec.storage, by_head)
        storage = spec.storage if spec.storage is Storage.TRANSPOSED else Storage.PARTS
        self.o = PackedLinear(q, {"o_proj": spec.width}, spec.output_bias and spec.shard.rank == 0, storage)
        normed = {HeadNorm.NONE: (0, 0), HeadNorm.EACH: (self.head_dim,) * 2, HeadNorm.TOGETHER: (q, kv)}
        q_size, k_size = normed[spec.head_norm]
        offset = 1.0 if spec.norm is Norm.RMS_PLUS_ONE else 0.0
        self.q_norm = RMSNorm(q_size, spec.eps, offset) if q_size else None
        self.k_norm = RMSNorm(k_size, spec.eps, offset) if k_size else None

    def forward(self, x: Tensor, rotate: Rotate, attend: AttentionFn) -> Tensor:
        """[T, D] -> [T, D]; of several ranks, each returns its summand."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        qk, v = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = torch.split(rotate(self.normed(qk)), [self.heads, self.kv_heads], dim=1)
        out: Tensor = self.o(attend(self.layer, q, k, v).flatten(1))
        return out

    def normed(self, qk: Tensor) -> Tensor:
        """Returns the normalised heads of queries and keys [T, heads, d]."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        parts = torch.split(qk, [self.heads, self.kv_heads], dim=1)
        together = self.head_norm is HeadNorm.TOGETHER
        if together and self.cut is not None:
            return torch.cat(self._normed_together(parts), dim=1)
        heads = [
            norm(part.flatten(1)).view(part.shape) if together else norm(part)
            for norm, part in zip((self.q_norm, self.k_norm), parts, strict=True)
        ]
        return torch.cat(heads, dim=1)

    def _normed_together(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns the rank's queries and keys [T, heads, d], normalised by the sums of squares of all ranks' heads."""
        norms: list[Any] = [self.q_norm, self.k_norm]
        assert self.cut is not None
        assert self.collectives is not None
        whole = self.cut.whole
        squares = [part.float().square().sum((1, 2)) for part in parts]
        squares[1] /= self.cut.holders  # each of them adds the same
        sums = self.collectives.all_reduce(torch.stack(squares, dim=1))
        normed = []
        for i, (norm, part, heads) in enumerate(zip(norms, parts, (whole.heads, whole.kv_heads), strict=True)):
            factor = (sums[:, i] / (heads * self.head_dim) + norm.eps).rsqrt()
            normed.append((part.float() * factor[:, None, None] * norm.scale.view(part.shape[1:])).to(part.dtype))
        return normed

    def normed_row(self, packed: Tensor) -> Tensor:
        """Returns the output of `qkv` [T, (Hq + 2 Hkv) * d] with normalised queries and keys."""
        heads = packed.view(len(packed), -1, self.head_dim)
        qk, v = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads], dim=1)
        return torch.cat((self.normed(qk), v), dim=1).flatten(1)


class Layer(nn.Module):
    """One block of the transformer. The norm behind it adds its result to the residual, in the same pass."""

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, index: int, collectives: Collectives | None = None) -> None:
        super().__init__()
        before, after = spec.placement is not Placement.AFTER, spec.placement in (Placement.AFTER, Placement.AROUND)
        self.parallel = spec.placement is Placement.PARALLEL
        self.attention_in = norm_of(spec) if before else None
        self.self_attn = DecoderAttention(spec, layer, index, collectives)
        self.collectives = collectives
        self.attention_out = norm_of(spec) if after else None
        self.mlp_in = norm_of(spec) if before else None
        self.mlp = MLP(spec, spec.inner) if layer.experts is None else MixtureOfExperts(spec, layer.experts)
        self.mlp_out = norm_of(spec) if after else None

    def forward(self, x: Tensor, residual: Tensor, rotate: Rotate, attend: AttentionFn) -> tuple[Tensor, Tensor]:
        """Output `x` [T, D] of the previous layer and the `residual` [T, D] without it -> both of this layer."""
        x, residual = _add(self.attention_in, x, residual)
        x = self.self_attn(x, rotate, attend)
        if self.parallel and self.mlp_in is not None:
            return self._of_all_ranks(x + self.mlp(self.mlp_in(residual))), residual
        x = self._of_all_ranks(x)
        if self.attention_out is not None:
            x = self.attention_out(x)
        x, residual = _add(self.mlp_in, x, residual)
        x = self._of_all_ranks(self.mlp(x))
        return (x if self.mlp_out is None else self.mlp_out(x)), residual

    def _of_all_ranks(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' summands [T, D]."""
        return x if self.collectives is None else self.collectives.all_reduce(x)


def norm_of(spec: DecoderSpec) -> nn.Module:
    """Returns a new norm of hidden states."""
    if spec.norm is Norm.LAYER:
        return LayerNorm(spec.width, spec.eps)
    return RMSNorm(spec.width, spec.eps, 1.0 if spec.norm is Norm.RMS_PLUS_ONE else 0.0)


def _add(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum, normalised if there is a norm, and the sum."""
    if norm is None:
        total = x + residual
        return total, total
    pair: tuple[Tensor, Tensor] = norm.add(x, residual)
    return pair


class Decoder(nn.Module):
    """The stack of blocks between embedding and output."""

    def __init__(
        self,
        spec: DecoderSpec,
        vocabulary: VocabularyPart | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.vocabulary = spec.embedding_scale, vocabulary
        self.embed_tokens = embedding(spec.vocab_size if vocabulary is None else len(vocabulary.rows), spec.width)
        self.embed_positions = embedding(spec.learned_positions, spec.width) if spec.learned_positions else None
        layers = enumerate(spec.layers)
        self.layers = nn.ModuleList(Layer(spec, layer, index, collectives) for index, layer in layers)
        self.norm = norm_of(spec)
        ropes = [layer.rope for layer in spec.layers]
        kinds = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        head_dim = spec.layers[0].attention.head_size
        self.rotaries = nn.ModuleList(rotary_embedding(rope, head_dim) for rope in kinds)
        self.turns = [None if rope is None else kinds.index(rope) for rope in ropes]
        """Index in `rotaries` of each layer's rotation; None: it has none."""

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """[T], [T] -> [T, D]."""
        if self.vocabulary is None:
            residual: Tensor = self.embed_tokens(token_ids)
        else:
            residual = self.vocabulary.look_up(self.embed_tokens, token_ids)
        if self.scale != 1.0:
            residual = residual * self.scale
        if self.embed_positions is not None:
            residual = residual + self.embed_positions(positions)
        rotations = [rotary(positions, residual.dtype) for rotary in self.rotaries]
        x = torch.zeros_like(residual)  # nothing comes before the first layer
        for layer, turn in zip(self.layers, self.turns, strict=True):
            x, residual = layer(x, residual, _still if turn is None else rotations[turn], attend)
        out, _ = _add(self.norm, x, residual)
        return out


def _still(x: Tensor) -> Tensor:
    """Returns heads unchanged, in place of a rotation."""
    return x


@dataclass(frozen=True, slots=True)
class DecoderPart(ModelCut):
    """A rank's part of a `DecoderLM`."""

    cut: Cut

    @override
    def of_rank(self, rank: int) -> "DecoderPart":
        return DecoderPart(replace(self.cut, shard=replace(self.cut.shard, rank=rank)))

    @override
    def held(self, parameter: str) -> Slices:
        return self.cut.held(parameter)

    @override
    def build(self, collectives: Collectives) -> "DecoderLM":
        return DecoderLM(self.cut.spec(), collectives)


class DecoderLM(CausalLM):
    """A model of any family that a `DecoderSpec` describes."""

    def __init__(self, spec: DecoderSpec, collectives: Collectives | None = None) -> None:
        """With `collectives`, `spec` is a rank's part of the model; see `Cut`."""
        vocabulary = None
        if collectives is not None:
            vocabulary = VocabularyPart.of(spec.vocab_size, spec.shard, spec.vocabulary_unit, collectives)
        super().__init__(spec.model, spec.width, spec.tied, vocabulary)
        self.described = spec
        self.logit_cap = spec.logit_cap
        self._names = NAMES[spec.placement] | spec.names
        self.model = Decoder(spec, vocabulary, collectives)

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        return self.model.embed_tokens.weight

    @override
    def cut(self, shard: Shard, units: Units) -> DecoderPart:
        return DecoderPart(Cut(self.described, shard, units))

    @override
    def stored_name(self, name: str) -> str:
        return ".".join(self._names.get(part, part) for part in name.split("."))

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        out: Tensor = self.model(token_ids, positions, attend)
        return out
