"""The description of a decoder, from which `decoder.py` builds a model of any native family."""

from dataclasses import dataclass, field
from enum import Enum

from pagewire.kernels.activation import Activation
from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.heads import HeadCut
from pagewire.services.executor.models.model import ModelSpec
from pagewire.services.executor.models.rope import Rope
from pagewire.services.executor.models.shard import ALONE, Shard


class Norm(Enum):
    """The normalisation of hidden states."""

    RMS = "rms"
    """RMSNorm (Zhang and Sennrich, 2019)."""
    RMS_PLUS_ONE = "rms_plus_one"
    """RMSNorm whose factors are the stored weights plus one (Gemma)."""
    LAYER = "layer"
    """LayerNorm with a bias (Ba et al., 2016)."""


class Placement(Enum):
    """Places of the norms in a block of attention and feed-forward layer."""

    BEFORE = "before"
    """Norms of the inputs of both."""
    AFTER = "after"
    """Norms of the results of both, before they are added to the residual."""
    AROUND = "around"
    """Norms of the inputs and of the results of both."""
    PARALLEL = "parallel"
    """Norms of the inputs of both, which both are the block's input."""


class HeadNorm(Enum):
    """The RMSNorm of queries and keys, before the rotation."""

    NONE = "none"
    EACH = "each"
    """Each head alone, all with the same weights."""
    TOGETHER = "together"
    """All heads of the queries as one vector, and all heads of the keys."""


class Storage(Enum):
    """The form in which a checkpoint stores the matrices of a block."""

    PARTS = "parts"
    """q, k and v apart, gates and values apart."""
    WHOLE = "whole"
    """q, k and v as one matrix, gates and values as one."""
    TRANSPOSED = "transposed"
    """Whole matrices, each as [inputs, outputs]."""
    BY_HEAD = "by_head"
    """q, k and v as one matrix, ordered by heads first."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of a feed-forward layer (Shazeer et al., 2017)."""

    count: int
    """Number of experts."""
    chosen: int
    """Number of experts per token."""
    inner: int
    """Inner features of an expert."""
    normalized: bool
    """Whether the weights of a token's experts sum to 1."""
    shared: int = 0
    """Inner features of the expert that every token has; 0: there is none."""
    own: range | None = None
    """The experts of this rank; None: all."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A block of attention and feed-forward layer."""

    attention: Attention
    rope: Rope | None
    """The rotation of queries and keys by their positions; None: they are not rotated."""
    experts: ExpertsSpec | None = None
    """The mixture of experts; None: a feed-forward layer with `DecoderSpec.inner` features."""
    heads: HeadCut | None = None
    """Cut of the heads, of which `attention` has a rank's part; None: there is one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder. The defaults are those of Llama."""

    vocab_size: int
    width: int
    """Features of a hidden state."""
    inner: int
    """Inner features of a feed-forward layer."""
    layers: tuple[LayerSpec, ...]
    eps: float
    """Number that all norms add to the variance."""
    tied: bool = False
    """Whether the embedding is also the output matrix."""
    norm: Norm = Norm.RMS
    placement: Placement = Placement.BEFORE
    head_norm: HeadNorm = HeadNorm.NONE
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    gated: bool = True
    """Whether the activation is that of gates, which multiply as many values (Shazeer, 2020)."""
    activation: Activation = Activation.SILU
    learned_positions: int = 0
    """Rows of a table of positions, which are added to the embeddings; 0: there is none."""
    embedding_scale: float = 1.0
    """Factor of the embeddings at the input."""
    logit_cap: float = 0.0
    """Logits become cap * tanh(logit / cap); 0: no cap."""
    storage: Storage = Storage.PARTS
    names: dict[str, str] = field(default_factory=dict)
    """The checkpoint's names for modules of `decoder.py`, where they differ."""
    shard: Shard = ALONE
    """The rank whose part this is; `width` and `vocab_size` are those of the whole."""
    vocabulary_unit: int = 1
    """Rows of the vocabulary between which it may be cut."""

    def __post_init__(self) -> None:
        if any(layer.experts is not None and layer.experts.chosen > layer.experts.count for layer in self.layers):
            raise ValueError("a token has more experts than there are")

    @property
    def model(self) -> ModelSpec:
        """The sizes that a device needs."""
        bounds = [rope.max_length for layer in self.layers if (rope := layer.rope) is not None]
        lengths = [bound for bound in bounds if bound is not None]
        return ModelSpec(self.vocab_size, tuple(layer.attention for layer in self.layers), min(lengths, default=None))
