"""The compiled CPU kernels as functions of tensors.

They compute in float32, for any dtype of weights and KV, with three exceptions. In products in bf16 both factors are
bf16 (`CpuKernels.paired`), with integer weights the inputs are rounded in chunks of 32 (`integers.hpp`), and with KV in
int8 queries and softmax weights are rounded to int16.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Array, addressof, byref, c_char, c_double, c_float, c_int, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.kernels.activation import Activation
from pagewire.kernels.attention_layer import Attention
from pagewire.kernels.cpu.packed import POOL_DTYPES, Packed, fold, pack_floats, pack_integers
from pagewire.kernels.scales import Multiples
from pagewire.shared.messages.step import LOWEST_LOGPROB

Int64 = npt.NDArray[np.int64]


class Batch(ctypes.Structure):
    """The rows of one step and block tables; see `batches_of`."""

    _fields_ = (
        ("slots", c_void_p),
        ("num_computed_tokens", c_void_p),
        ("query_lens", c_void_p),
        ("rows", c_int64),
        ("tables", c_void_p),
        ("columns", c_int64),
    )


class AttentionShape(ctypes.Structure):
    """The sizes and constants of a layer's attention."""

    _fields_ = (
        *((name, c_int64) for name in ("heads", "kv_heads", "dim", "value_dim", "block_size", "window", "chunk")),
        *((name, c_int64) for name in ("dtype", "threads")),
        *((name, c_double) for name in ("scale", "soft_cap")),
    )


class Inputs(ctypes.Structure):
    """The tensors of one call of attention."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("sinks", "out")),
    )


class Norm(ctypes.Structure):
    """The weights of a norm; without a bias it is RMSNorm, else LayerNorm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class LogitEdits(ctypes.Structure):
    """The changes of one slot's logits: the struct `Edits` in `sampling.cpp`. Zeros change nothing."""

    _fields_ = (
        ("allowed", c_void_p),
        ("bias_ids", c_void_p),
        ("biases", c_void_p),
        ("num_biases", c_int64),
        ("seen", c_void_p),
        ("bad_words", c_void_p),
        ("num_bad_words", c_int64),
        ("history", c_void_p),
        ("num_prompt_tokens", c_int64),
    )


class SamplerInput(ctypes.Structure):
    """Sampling parameters by slot: pointers to records, to the ids that end sequences, and to `LogitEdits`.

    `stop_ids` int64 [slots, `stop_width`] is padded with -1.
    """

    _fields_ = (("records", c_void_p), ("stop_ids", c_void_p), ("stop_width", c_int64), ("edits", c_void_p))


class CpuKernels:
    """The kernels of a loaded library.

    Attributes:
        threads: maximum threads of a call; may be changed between calls. The kernels have their own threads, not
            those of torch.
        paired: numbers per multiplication with weights or KV in bf16: 2 if the CPU has an instruction for pairs of bf16
            numbers, which both factors then are; else 1.
        tiled: whether products with weights in bf16 use AMX: the CPU has it, and Linux lets this process use it.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self._library = library
        self._lanes = int(library.lanes())
        self.paired = int(library.paired())
        self._depth = int(library.depth())
        self.tiled = bool(library.tiled())
        self._embed = self.function("embed", [c_void_p, c_void_p, c_void_p, c_int64, c_int])
        self._normalize = self.function(
            "normalize", [c_void_p, c_int64, c_void_p, Norm, c_float, c_void_p, *[c_int64] * 4, c_int]
        )
        self._rotate = self.function("rotate", [c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 4, c_int])
        self._activate = self.function("activate", [c_void_p, c_void_p, c_int, c_int, c_int64, c_int64, c_int])
        self._linear = self.function("linear", [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int])
        self._linear_argmax = self.function("linear_argmax", [*[c_void_p] * 4, c_int64, c_int])
        self._attend = self.function(
            "attend", [POINTER(Batch), POINTER(AttentionShape), POINTER(Inputs), c_void_p, c_void_p]
        )
        rows = [c_void_p, c_int64, POINTER(SamplerInput), c_void_p, c_void_p, c_int64]
        self._edit_logits = self.function("edit_logits", [*rows, c_int])
        self._sample = self.function("sample", [*rows, c_void_p, c_int])
        self._reduce_logprobs = self.function(
            "reduce_logprobs", [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int, c_float, c_void_p, c_int]
        )

    def function(self, name: str, arguments: list[Any]) -> Callable[..., None]:
        """Returns a function of the library without a result."""
        function: Callable[..., None] = getattr(self._library, name)
        function.argtypes, function.restype = arguments, None  # type: ignore[attr-defined]
        return function

    def pool_shapes(
        self, blocks: int, layer: Attention, block_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of a layer's keys and values in the KV pool.

        Keys are [blocks, Hkv, D / p, block size, p] and values [blocks, Hkv, block size / p, D, p], where p is `paired`
        in bf16, 2 in int8 and 1 otherwise. D of the values is padded to whole registers. In int8, D / p of the keys has
        4 more entries: float32 scales [2, block size] of keys and values.
        """
        together = {torch.bfloat16: self.paired, torch.int8: 2}.get(dtype, 1)
        scales = 2 * torch.float32.itemsize // together if dtype == torch.int8 else 0
        filled = -(-layer.value_head_size // self._lanes) * self._lanes
        keys = (blocks, layer.kv_heads, -(-layer.head_size // together) + scales, block_size, together)
        return keys, (blocks, layer.kv_heads, -(-block_size // together), filled, together)

    def embed(self, table: Packed, ids: Tensor) -> Tensor:
        """Returns float32 rows [T, D], by int64 `ids` [T], of `packed.table` or of packed integers."""
        out = torch.empty(len(ids), table.inputs)
        self._embed(table.parts, ids.data_ptr(), out.data_ptr(), len(ids), self.threads)
        return out

    def normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Returns the norm of x [T, D] or [T, H, D], which is contiguous in all but T, over the last dimension.

        `weight` and `bias` are float32 [D]. Without a bias it is RMSNorm, else LayerNorm.
        """
        out = torch.empty(x.shape)
        rows, width = len(x), x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        norm = Norm(weight.data_ptr(), None if bias is None else bias.data_ptr())
        pointers = x.data_ptr(), x.stride(0), None, norm, eps, out.data_ptr(), out.stride(0)
        self._normalize(*pointers, rows, heads, width, self.threads)
        return out

    def rotate(self, x: Tensor, table: Tensor, positions: Tensor) -> None:
        """Rotates the pairs (i, i + r/2) of the first r features of each head of x [T, H, D] in place.

        A row of `table` [P, r] is cosines, then sines.
        """
        pointers = x.data_ptr(), x.stride(0), table.data_ptr(), positions.data_ptr()
        self._rotate(*pointers, *x.shape, table.shape[1], self.threads)

    def activate(self, x: Tensor, kind: Activation, *, gated: bool) -> Tensor:
        """Returns the activation of x [T, D]; of gates, the first half of each row times the second half [T, D / 2]."""
        rows, width = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
        out = torch.empty(rows, width)
        self._activate(x.data_ptr(), out.data_ptr(), kind, gated, rows, width, self.threads)
        return out

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """Returns a packed copy of the weights [outputs, inputs], in their own dtype."""
        return pack_floats(weight, bias, self._lanes, self.paired, self._depth)

    def fold(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights [outputs, inputs], as `packed.fold` does; tiles of the CPU take them as they are."""
        if weight.dtype != torch.bfloat16:
            return fold(weight, self._lanes, 1)
        return (weight, weight[:0]) if self.tiled else fold(weight, self._lanes, self._depth)

    def pack_integers(
        self,
        codes: Tensor,
        bits: int,
        scales: Tensor | Multiples,
        zero: int = 0,
        minima: Tensor | Multiples | None = None,
        bias: Tensor | None = None,
    ) -> Packed:
        """Returns packed integer weights, as `packed.pack_integers` describes them."""
        return pack_integers(codes, bits, scales, zero, minima, bias, self._lanes)

    def linear(self, x: Tensor, weights: Packed, out: Tensor | None = None) -> Tensor:
        """Returns [T, inputs] -> [T, outputs], in `out` if given. A row's result does not depend on the other rows."""
        rows = x.shape[0]  # len() of a tensor takes several times as long
        out = torch.empty(rows, weights.outputs) if out is None else out
        x, parts = x.contiguous(), weights.parts
        self._linear(x.data_ptr(), parts, len(parts), out.data_ptr(), rows, weights.outputs, self.threads)
        return out

    def linear_argmax(self, x: Tensor, weights: Packed, most: Tensor | None = None) -> Int64:
        """Returns the indices [T] of the largest outputs of `linear`, the first of equal ones, for weights of one part.

        A row with NaN, or whose largest output is infinite, has `sampling_parameters.NOT_FINITE` instead. The outputs
        themselves are written to `most`, float32 [T], if it is given.
        """
        rows = x.shape[0]
        out, x = np.empty(rows, np.int64), x.contiguous()
        largest = None if most is None else most.data_ptr()
        self._linear_argmax(x.data_ptr(), weights.parts, address(out), largest, rows, self.threads)
        return out

    def attend(
        self,
        batch: Batch,
        layer: Attention,
        pool: Sequence[Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes k [T, Hkv, D] and v [T, Hkv, Dv] to the pool and returns the attention [T, Hq, Dv] of q [T, Hq, D].

        Args:
            batch: an entry of the result of `batches_of`.
            layer: the constants of the attention.
            pool: keys and values in the shapes of `pool_shapes`.
            q: [T, Hq, D], contiguous in all but T.
            k: [T, Hkv, D], contiguous in all but T.
            v: [T, Hkv, Dv], contiguous in all but T.
            sinks: [Hq] score of a key without value, contiguous; None: there is none.
        """
        keys, values = pool
        out = torch.empty(*q.shape[:2], layer.value_head_size)
        shape = AttentionShape(
            layer.heads,
            layer.kv_heads,
            layer.head_size,
            layer.value_head_size,
            keys.shape[3],
            layer.window,
            layer.chunk,
            POOL_DTYPES[keys.dtype],
            self.threads,
            layer.scale,
            layer.soft_cap,
        )
        tensors = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0)
        inputs = Inputs(*tensors, None if sinks is None else sinks.data_ptr(), out.data_ptr())
        self._attend(byref(batch), byref(shape), byref(inputs), keys.data_ptr(), values.data_ptr())
        return out

    def edit_logits(self, logits: Tensor, table: SamplerInput, slots: Int64, positions: Int64) -> None:
        """Edits the logits [R, V] of the tokens at `positions` [R] of `slots` [R] in place."""
        rows, vocabulary = logits.shape
        columns = address(slots), address(positions), rows
        self._edit_logits(logits.data_ptr(), vocabulary, byref(table), *columns, self.threads)

    def sample(self, logits: Tensor, table: SamplerInput, slots: Int64, positions: Int64) -> Int64:
        """Samples the tokens [R] at `positions` [R] of `slots` [R] from logits [R, V].

        A row with NaN, or whose largest logit is infinite, has `sampling_parameters.NOT_FINITE` instead.
        """
        tokens = np.empty(len(slots), np.int64)
        rows, vocabulary = logits.shape
        columns = address(slots), address(positions), rows, address(tokens)
        self._sample(logits.data_ptr(), vocabulary, byref(table), *columns, self.threads)
        return tokens

    def reduce_logprobs(self, logits: Tensor, tokens: Tensor, num_logprobs: int, *, normalized: bool = True) -> Tensor:
        """Returns the executor's `devices.logprobs.reduce_logprobs`; equal tokens come in the order of their ids."""
        (rows, vocabulary), logits = logits.shape, logits.contiguous()
        entries = 1 + min(num_logprobs - 1, vocabulary)
        out = torch.empty(rows, 2 * entries + 1, dtype=torch.int32)
        inputs = logits.data_ptr(), vocabulary, tokens.data_ptr(), rows, entries, normalized, LOWEST_LOGPROB
        self._reduce_logprobs(*inputs, out.data_ptr(), self.threads)
        return out


def batches_of(slots: Int64, num_computed_tokens: Int64, query_lens: Int64, tables: Int64) -> Array[Batch]:
    """Returns the batch of a step for each group of layers. The arrays must outlive it: it only holds pointers.

    Args:
        slots: [R] slot of each row.
        num_computed_tokens: [R] first position of each row.
        query_lens: [R] number of positions of each row.
        tables: [groups, slots, blocks] block ids.
    """
    rows = address(slots), address(num_computed_tokens), address(query_lens), len(slots)
    (groups, _, columns), first, size = tables.shape, address(tables), tables.strides[0]
    batches: Array[Batch] = (Batch * groups)(*[Batch(*rows, first + i * size, columns) for i in range(groups)])
    return batches


def address(array: npt.NDArray[np.generic]) -> int:
    """Returns the address of an array's data; 0 if the array is empty.

    Raises:
        TypeError: the array is not C-contiguous, or not writable.
    """
    return addressof(c_char.from_buffer(array.data)) if array.size else 0  # several times as fast as numpy's `ctypes`
