"""All layers of a decoder as one call of the compiled kernels."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Array, addressof, byref, c_double, c_int64, c_void_p, pointer
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.activation import Activation
from pagewire.kernels.attention_layer import Attention
from pagewire.kernels.cpu.adapters import Adapted
from pagewire.kernels.cpu.collectives import Ranks, SharedMemoryCollectives
from pagewire.kernels.cpu.experts import CompiledExperts, Experts
from pagewire.kernels.cpu.kernels import Batch, CpuKernels
from pagewire.kernels.cpu.kernels import Norm as _Norm
from pagewire.kernels.cpu.packed import POOL_DTYPES, Matrix, Packed

Pool = tuple[Tensor, Tensor]
"""Keys and values of a layer, in the shapes of `CpuKernels.pool_shapes`."""


Norm = tuple[Tensor, Tensor | None]
"""Weights and bias of a norm, float32; without a bias it is RMSNorm, else LayerNorm."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. A norm that is None does not take place."""

    attention: Attention
    group: int
    """Index of its block tables in the batches of a step."""
    number: int
    """Number of `qkv` in the model, by which adapters know it; those of `o` and of the two products follow."""
    attention_in: Norm | None
    attention_out: Norm | None
    mlp_in: Norm | None
    mlp_out: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    qkv: Packed
    o: Packed
    mlp: tuple[Packed, Packed] | CompiledExperts
    """The two products of a dense feed-forward layer, or a mixture of experts."""
    table: Tensor | None
    """Table of `CpuKernels.rotate`; None: heads are not rotated."""


@dataclass(frozen=True, slots=True)
class Form:
    """The settings that all layers share."""

    eps: float
    """Number that all norms add to the variance."""
    activation: Activation
    gated: bool
    """Whether the activation multiplies gates with values."""
    parallel: bool
    """Whether attention and feed-forward layer read the same hidden states."""
    together: bool
    """Whether `q_norm` and `k_norm` normalize all heads as one vector."""
    embedding_scale: float
    """Factor of the embeddings."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a model that one of several ranks computes."""

    collectives: SharedMemoryCollectives
    first_id: int
    """Id of the first row of the embedding."""
    q_width: int
    """Numbers of the queries of all ranks."""
    k_width: int
    """Numbers of the keys of all ranks."""
    holders: int
    """Number of ranks that have the same KV heads."""


class _Layer(ctypes.Structure):
    """The struct `Layer` of `decoder.cpp`."""

    _fields_ = (
        *((name, _Norm) for name in ("attention_in", "attention_out", "mlp_in", "mlp_out", "q_norm", "k_norm")),
        *((name, Matrix) for name in ("qkv", "o", "up", "down")),
        ("experts", POINTER(Experts)),
        ("table", c_void_p),
        *((name, c_int64) for name in ("rotated", "window", "group", "number")),
        *((name, c_double) for name in ("scale", "soft_cap")),
    )


class _Decoder(ctypes.Structure):
    """The struct `Decoder` of `decoder.cpp`."""

    _fields_ = (
        ("layers", POINTER(_Layer)),
        *((name, c_int64) for name in ("count", "width", "heads", "kv_heads", "dim", "block_size")),
        *((name, c_void_p) for name in ("embedding", "places")),
        ("norm", _Norm),
        *((name, c_double) for name in ("eps", "embedding_scale")),
        *((name, c_int64) for name in ("parallel", "together", "gated", "activation", "dtype", "threads")),
        ("ranks", POINTER(Ranks)),
        *((name, c_int64) for name in ("first_id", "q_width", "k_width", "holders")),
    )


class _Pool(ctypes.Structure):
    """The struct `Pool` of `decoder.cpp`: one layer's."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p))


class CompiledDecoder:
    """Embedding and layers that run as one call.

    Attributes:
        seconds: total seconds in matrix products, and in attention.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        embedding: Packed,
        places: Packed | None,
        layers: Sequence[Layer],
        norm: Norm,
        form: Form,
        part: RankPart | None = None,
    ) -> None:
        """`embedding` [V, D] and `places` [positions, D] are tables; see `CpuKernels.embed`.

        `places`, if there are any, are added to the embeddings; `norm` [D] follows the last layer. With `part`, the
        weights are those of one rank.
        """
        self.seconds = (c_double * 2)()
        self._kernels = kernels
        self._tensors = (embedding, places, list(layers), norm)  # keeps alive what the structs point to
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._width = embedding.inputs
        heads = layers[0].attention
        self._fixed: dict[str, Any] = {
            "layers": self._layers,
            "count": len(layers),
            "width": self._width,
            "heads": heads.heads,
            "kv_heads": heads.kv_heads,
            "dim": heads.head_size,
            "embedding": addressof(embedding.parts),
            "places": None if places is None else addressof(places.parts),
            "norm": _norm(norm),
            **asdict(form),
        }
        self._collectives = None if part is None else part.collectives
        if part is not None:
            self._fixed["ranks"] = pointer(part.collectives.pointers)
            self._fixed |= {name: getattr(part, name) for name in ("first_id", "q_width", "k_width", "holders")}
        self._pools: Sequence[Pool] = ()
        self._decode = kernels.function(
            "decode", [*[c_void_p] * 2, POINTER(Batch), *[c_void_p] * 2, c_int64, c_void_p, c_int64, *[c_void_p] * 2]
        )

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        batches: Array[Batch],
        pools: Sequence[Pool],
        adapted: Array[Adapted] | None = None,
    ) -> Tensor:
        """Returns the hidden states [T, D] of the tokens; of several ranks, all get the same.

        Args:
            ids: int64 [T].
            positions: int64 [T].
            batches: result of `batches_of`.
            pools: KV pool of each layer. Passing the same object again is free.
            adapted: the rows of each adapter; None: no row has one.

        Raises:
            RanksAborted: a rank is lost.
        """
        if pools is not self._pools:
            self._bind(pools)
        self._model.threads = self._kernels.threads
        tokens = ids.shape[0]
        out = torch.empty(tokens, self._width)
        pointers = byref(self._model), self._addresses, batches, ids.data_ptr(), positions.data_ptr()
        adapters = 0 if adapted is None else len(adapted)
        self._decode(*pointers, tokens, adapted, adapters, out.data_ptr(), self.seconds)
        if self._collectives is not None:
            self._collectives.check()
        return out

    def _bind(self, pools: Sequence[Pool]) -> None:
        keys, _ = pools[0]
        self._model = _Decoder(**self._fixed, block_size=keys.shape[3], dtype=POOL_DTYPES[keys.dtype])
        self._addresses = (_Pool * len(pools))(*(_Pool(keys.data_ptr(), values.data_ptr()) for keys, values in pools))
        self._pools = pools


def _layer(layer: Layer) -> _Layer:
    norms = layer.attention_in, layer.attention_out, layer.mlp_in, layer.mlp_out, layer.q_norm, layer.k_norm
    if isinstance(layer.mlp, CompiledExperts):
        dense, experts = (Matrix(), Matrix()), pointer(layer.mlp.pointers)
    else:
        dense, experts = (layer.mlp[0].matrix, layer.mlp[1].matrix), None
    return _Layer(
        *map(_norm, norms),
        layer.qkv.matrix,
        layer.o.matrix,
        *dense,
        experts,
        _pointer(layer.table),
        0 if layer.table is None else layer.table.shape[1],
        layer.attention.window,
        layer.group,
        layer.number,
        layer.attention.scale,
        layer.attention.soft_cap,
    )


def _norm(norm: Norm | None) -> _Norm:
    return _Norm() if norm is None else _Norm(*map(_pointer, norm))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
