"""All layers of a decoder as one call of the compiled kernels."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, addressof, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import Batch, CpuKernels
from pagewire.kernels.cpu.packed import DTYPES, Packed

Pool = tuple[Tensor, Tensor]
"""Keys and values of a layer: see `CpuKernels.attend`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; norms are float32."""

    input_norm: Tensor
    post_attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Packed
    o: Packed
    gate_up: Packed
    down: Packed
    window: int
    """Number of positions that a query sees, its own included; 0: all."""


class _Matrix(ctypes.Structure):
    _fields_ = (("parts", c_void_p), ("count", c_int64), ("inputs", c_int64), ("outputs", c_int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        ("window", c_int64),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        *((name, c_int64) for name in ("count", "width", "heads", "kv_heads", "dim", "block_size")),
        *((name, c_void_p) for name in ("embedding", "norm", "table")),
        ("eps", c_double),
        *((name, c_int64) for name in ("dtype", "threads")),
    )


class _Pool(ctypes.Structure):
    _fields_ = (("keys", c_void_p), ("values", c_void_p))


class CompiledDecoder:
    """Embedding and layers that run as one call.

    Attributes:
        seconds: total time in matrix products and in attention.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        embedding: Packed,
        layers: Sequence[Layer],
        norm: Tensor,
        table: Tensor,
        eps: float,
        heads: int,
    ) -> None:
        """`norm` [D] follows the last layer, `table` is as for `CpuKernels.rotate`, `heads` counts query heads."""
        self.seconds = (c_double * 2)()
        self._kernels = kernels
        self._tensors = (embedding, list(layers), norm, table)  # keeps alive what the structs point to
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._fixed = {
            "layers": self._layers,
            "count": len(layers),
            "width": len(norm),
            "embedding": addressof(embedding.parts),
            "heads": heads,
            "dim": layers[0].o.inputs // heads,
            "norm": norm.data_ptr(),
            "table": table.data_ptr(),
            "eps": eps,
        }
        self._width = len(norm)
        self._pools: Sequence[Pool] = ()
        self._decode = kernels.function(
            "decode", [c_void_p, c_void_p, POINTER(Batch), c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
        )

    def __call__(self, ids: Tensor, positions: Tensor, batch: Batch, pools: Sequence[Pool]) -> Tensor:
        """Returns the hidden states [T, D] of the tokens.

        Args:
            ids: int64 [T].
            positions: int64 [T].
            batch: result of `batch_of`.
            pools: KV pool of each layer. Passing the same object again is free.
        """
        if pools is not self._pools:
            self._bind(pools)
        self._model.threads = self._kernels.threads
        tokens = ids.shape[0]
        out = torch.empty(tokens, self._width)
        pointers = byref(self._model), self._addresses, byref(batch), ids.data_ptr(), positions.data_ptr()
        self._decode(*pointers, tokens, out.data_ptr(), self.seconds)
        return out

    def _bind(self, pools: Sequence[Pool]) -> None:
        keys, _ = pools[0]
        _, kv_heads, _, block_size, _ = keys.shape
        self._model = _Decoder(**self._fixed, kv_heads=kv_heads, block_size=block_size, dtype=DTYPES[keys.dtype])
        self._addresses = (_Pool * len(pools))(*(_Pool(keys.data_ptr(), values.data_ptr()) for keys, values in pools))
        self._pools = pools


def _layer(layer: Layer) -> _Layer:
    norms = (layer.input_norm, layer.post_attention_norm, layer.q_norm, layer.k_norm)
    weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return _Layer(*map(_pointer, norms), *map(_matrix, weights), layer.window)


def _matrix(packed: Packed) -> _Matrix:
    return _Matrix(addressof(packed.parts), len(packed.parts), packed.inputs, packed.outputs)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
