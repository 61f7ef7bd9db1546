"""The interface of a language model: a function of a flat batch, to which the device passes the attention."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.layer_groups import LayerGroups, group_layers
from pagewire.services.executor.models.shard import Collectives, Shard, Slices, Units, VocabularyPart
from pagewire.shared.errors import ConfigurationError


class AttentionFn(Protocol):
    """Causal attention over the contexts of all rows. The device implements it, because it owns the KV cache.

    A call writes `k` and `v` at the positions of the batch and then attends from `q` as `ModelSpec.layers` says. The
    rows and their blocks are prepared once per step, outside of the model. A layer's kernel launches depend on shapes
    only, so the device can capture the whole model as a graph.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, Hq, d], [T, Hkv, d], [T, Hkv, dv] -> [T, Hq, dv]; query head h reads KV head h // (Hq // Hkv).

        `sinks` float32 [Hq] is each head's score of a key without value, which takes part in the softmax.
        """


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The sizes of a model that a device needs."""

    vocab_size: int
    """Rows of the embedding."""
    layers: tuple[Attention, ...]
    """The attention of each layer."""
    max_length: int | None = None
    """Context up to which a token's result is independent of the batch; None: any."""

    @property
    def groups(self) -> LayerGroups:
        """The groups of layers that share a block table."""
        return group_layers(self.layers)


class ModelCut(Protocol):
    """A rank's part of a model."""

    def of_rank(self, rank: int) -> "ModelCut":
        """Returns the part of another rank."""

    def held(self, parameter: str) -> Slices:
        """Returns the indices of a parameter of the whole model that the rank has."""

    def build(self, collectives: Collectives) -> "CausalLM":
        """Returns the rank's model, on torch's current device.

        Raises:
            ConfigurationError: the model has too few heads or features for the ranks.
        """


class CausalLM(nn.Module, ABC):
    """A decoder-only model. `stored_name` and `Stored` say where its parameters are in a checkpoint."""

    logit_cap = 0.0
    """Logits become cap * tanh(logit / cap); 0: no cap."""
    part: ModelCut | None = None
    """The rank's part that this is; None: this is the whole model."""

    def __init__(self, spec: ModelSpec, width: int, tied: bool, vocabulary: VocabularyPart | None = None) -> None:
        """`vocabulary` is the rank's part of several ranks'."""
        super().__init__()
        self.spec = spec
        self.vocabulary = vocabulary
        self.lm_head: Any = None if tied else nn.Linear(width, _rows(spec, vocabulary), bias=False)

    @property
    @abstractmethod
    def embedding(self) -> Tensor:
        """[V, D] embedding of the input ids, also used for the output if there is no `lm_head`.

        Of several ranks, each has its rows of it.
        """

    @property
    def progress(self) -> float:
        """Number that grows while `forward` computes; 0: the model does not say."""
        return 0.0

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """Int64 ids [T] at int64 positions [T] -> hidden states [T, D]."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden states [R, D] of the rows that sample -> float32 logits [R, V], in `out` if it is given."""
        head = self.embedding if self.lm_head is None else self.lm_head.weight
        product = F.linear(hidden, head)
        if self.vocabulary is not None:
            product = self.vocabulary.gather(product)
        return self.capped(product.float() if out is None else out.copy_(product))

    def capped(self, logits: Tensor) -> Tensor:
        """Returns logits below `logit_cap`, in their place."""
        return logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap) if self.logit_cap else logits

    def stored_name(self, name: str) -> str:
        """Returns a checkpoint's name of a tensor whose module is here called `name`."""
        return name

    def cut(self, shard: Shard, units: Units) -> ModelCut:
        """Returns how this model, which has no weights yet, is cut for a rank, in these units.

        Raises:
            ConfigurationError: the family cannot be cut.
        """
        del units
        raise ConfigurationError(
            f"{type(self).__name__} cannot be cut for {shard.size} ranks: set tensor-parallel-size to 1"
        )

    def argmax(self, hidden: Tensor) -> npt.NDArray[np.int64] | None:
        """Hidden states [R, D] -> ids [R] of the largest logits; None if that is not faster than the logits."""
        return None


def _rows(spec: ModelSpec, vocabulary: VocabularyPart | None) -> int:
    return spec.vocab_size if vocabulary is None else len(vocabulary.rows)
