"""Cuts a decoder for one of several ranks: heads, inner features and the vocabulary.

Norms, routers and tables of positions are whole on every rank.
"""

from dataclasses import dataclass, replace

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.heads import HeadCut, cut_heads
from pagewire.services.executor.models.shard import Ranges, Shard, Slices, Units, cut_inner, refuse_cut
from pagewire.services.executor.models.spec import DecoderSpec, ExpertsSpec, HeadNorm, LayerSpec

WHOLE: Slices = {}


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a decoder."""

    whole: DecoderSpec
    shard: Shard
    units: Units

    def spec(self) -> DecoderSpec:
        """Returns the description of the part.

        Raises:
            ConfigurationError: the model has too few heads or features for the ranks.
        """
        whole = self.whole
        if -(-whole.vocab_size // self.units.outputs) < self.shard.size:
            refuse_cut(self.shard, whole.vocab_size, "tokens", self.units.outputs)
        dense = any(layer.experts is None for layer in whole.layers)
        return replace(
            whole,
            inner=len(self._inner(whole.inner)) if dense else whole.inner,
            layers=tuple(self._layer(layer) for layer in whole.layers),
            shard=self.shard,
            vocabulary_unit=self.units.outputs,
        )

    def held(self, parameter: str) -> Slices:
        """Returns the indices of a parameter of `DecoderLM` that the part has."""
        module, _, kind = parameter.rpartition(".")
        _, _, name = module.rpartition(".")
        outputs, inputs = 0, 1
        match name:
            case "embed_tokens" | "lm_head":
                return {outputs: (self.shard.part(self.whole.vocab_size, self.units.outputs),)}
            case "qkv":
                return {outputs: self._heads(parameter).packed}
            case "o" if kind == "weight":
                return {inputs: (self._heads(parameter).output_features,)}
            case "q_norm" | "k_norm" if self.whole.head_norm is HeadNorm.TOGETHER:
                heads = self._heads(parameter)
                return {0: (heads.query_features if name == "q_norm" else heads.key_features,)}
            case "up":
                return {outputs: self._twice(self._inner_of(parameter)) if self.whole.gated else self._once(parameter)}
            case "down" if kind == "weight":
                return {inputs: self._once(parameter)}
            case "experts":
                experts = self._experts(parameter)
                if self.shard.by_expert:
                    return {0: (self._own(experts),)}
                inner = experts.inner
                return {1: self._twice(inner)} if kind == "gate_up" else {2: (self._inner(inner),)}
            case _:
                return WHOLE

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        heads = self._cut_heads(layer.attention)
        experts = layer.experts
        if experts is not None:
            shared = len(self._inner(experts.shared)) if experts.shared else 0
            if self.shard.by_expert:
                experts = replace(experts, own=self._own(experts), shared=shared)
            else:
                experts = replace(experts, inner=len(self._inner(experts.inner)), shared=shared)
        return replace(layer, attention=heads.attention, experts=experts, heads=heads)

    def _own(self, experts: ExpertsSpec) -> range:
        if experts.count < self.shard.size:
            refuse_cut(self.shard, experts.count, "experts", 1)
        return self.shard.part(experts.count)

    def _cut_heads(self, attention: Attention) -> HeadCut:
        return cut_heads(attention, self.shard, self.units)

    def _heads(self, parameter: str) -> HeadCut:
        return self._cut_heads(self._layer_of(parameter).attention)

    def _layer_of(self, parameter: str) -> LayerSpec:
        _, _, behind = parameter.partition("layers.")
        return self.whole.layers[int(behind.partition(".")[0])]

    def _experts(self, parameter: str) -> ExpertsSpec:
        experts = self._layer_of(parameter).experts
        assert experts is not None
        return experts

    def _inner_of(self, parameter: str) -> int:
        """Returns the inner features of the feed-forward layer that a parameter belongs to."""
        return self._experts(parameter).shared if ".shared_expert." in parameter else self.whole.inner

    def _once(self, parameter: str) -> Ranges:
        return (self._inner(self._inner_of(parameter)),)

    def _inner(self, features: int) -> range:
        return cut_inner(features, self.shard, self.units)

    def _twice(self, features: int) -> Ranges:
        """Returns the rank's part of gates and values."""
        part = self._inner(features)
        return part, range(features + part.start, features + part.stop)
