"""The compiled CPU kernels as functions of tensors.

All compute in float32, whatever weights and KV are stored in; of bf16 see `CpuKernels.paired`.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, addressof, byref, c_char, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Int64 = npt.NDArray[np.int64]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As the kernels number what weights and KV can be stored in."""


class Batch(ctypes.Structure):
    """The rows of one step; see `batch_of`."""

    _fields_ = (
        ("slots", c_void_p),
        ("num_computed_tokens", c_void_p),
        ("query_lens", c_void_p),
        ("rows", c_int64),
        ("tables", c_void_p),
        ("columns", c_int64),
    )


class Shape(ctypes.Structure):
    """What the attention of a layer is given beside its tensors."""

    _fields_ = tuple(
        (name, c_int64) for name in ("heads", "kv_heads", "dim", "block_size", "window", "dtype", "threads")
    )


class Inputs(ctypes.Structure):
    """The tensors of one attention."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        ("out", c_void_p),
    )


class SamplingTable(ctypes.Structure):
    """How the slots sample: pointers to their records, and to the ids that end their sequences.

    `stop_ids` int64 [slots, `stop_width`] is filled up with -1.
    """

    _fields_ = (("records", c_void_p), ("stop_ids", c_void_p), ("stop_width", c_int64))


@dataclass(frozen=True, slots=True)
class Packed:
    """The weights of a matrix product as the kernel reads them."""

    panels: Tensor
    """[panels, inputs, outputs of a panel], zeros behind the last output; in bf16 those of its two halves in turn, or
    where the CPU multiplies pairs [panels, pairs of inputs, outputs of a panel times 2], zeros behind the last."""
    bias: Tensor | None
    """[panels, outputs of a panel] in float32, zeros behind the last output."""
    inputs: int
    outputs: int


class CpuKernels:
    """Kernels of a loaded library.

    Attributes:
        threads: how many may take part in a call, and may be another number in the next. They are the kernels' own, not
            those of torch.
        paired: numbers that are multiplied at a time with weights or KV in bf16: 2 where the CPU has instructions for
            that, and there they are rounded to bf16 themselves; else 1.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self._library = library
        self._panel, self._lanes = int(library.panel_width()), int(library.lanes())
        self.paired = int(library.paired())
        self._embed = self.function("embed", [c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int])
        self._rms_norm = self.function(
            "rms_norm", [c_void_p, c_int64, *[c_void_p] * 2, c_float, c_void_p, *[c_int64] * 4, c_int]
        )
        self._rotate = self.function("rotate", [c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 3, c_int])
        self._silu_mul = self.function("silu_mul", [c_void_p, c_void_p, c_int64, c_int64, c_int])
        product = [c_void_p, c_void_p, c_int, c_void_p, c_void_p, *[c_int64] * 3, c_int]
        self._linear = self.function("linear", product)
        self._linear_argmax = self.function("linear_argmax", product)
        self._attend = self.function("attend", [POINTER(Batch), POINTER(Shape), POINTER(Inputs), c_void_p, c_void_p])
        self._sample = self.function(
            "sample", [c_void_p, c_int64, POINTER(SamplingTable), c_void_p, c_void_p, c_int64, c_void_p, c_int]
        )

    def function(self, name: str, arguments: list[Any]) -> Callable[..., None]:
        """A function of the library that returns nothing."""
        function: Callable[..., None] = getattr(self._library, name)
        function.argtypes, function.restype = arguments, None  # type: ignore[attr-defined]
        return function

    def pool_shapes(
        self, blocks: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the keys of a layer, [blocks, Hkv, D / p, block size, p], and of its values, [blocks, Hkv, block size / p,
        D, p], where p numbers lie side by side, `paired` in bf16 and 1 otherwise, and D is filled up to whole registers
        in the values.
        """
        together = self.paired if dtype == torch.bfloat16 else 1
        filled = -(-dim // self._lanes) * self._lanes
        keys = (blocks, kv_heads, -(-dim // together), block_size, together)
        return keys, (blocks, kv_heads, -(-block_size // together), filled, together)

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """The lines `ids` [T], int64, of a contiguous table [V, D] in any dtype of weights -> [T, D], float32."""
        rows, width = len(ids), table.shape[1]
        out = torch.empty(rows, width)
        pointers = table.data_ptr(), DTYPES[table.dtype], ids.data_ptr(), out.data_ptr()
        self._embed(*pointers, rows, width, self.threads)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square normalisation over the last dimension of x [T, D] or [T, H, D], contiguous in all but T."""
        out = torch.empty(x.shape)
        rows, width = len(x), x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        pointers = x.data_ptr(), x.stride(0), None, weight.data_ptr(), eps, out.data_ptr(), out.stride(0)
        self._rms_norm(*pointers, rows, heads, width, self.threads)
        return out

    def rotate(self, x: Tensor, table: Tensor, positions: Tensor) -> None:
        """Turns the pairs (i, i + D/2) of x [T, H, D] in place. A line of `table` [P, D] is cosines, then sines."""
        pointers = x.data_ptr(), x.stride(0), table.data_ptr(), positions.data_ptr()
        self._rotate(*pointers, *x.shape, self.threads)

    def silu_mul(self, x: Tensor) -> Tensor:
        """SiLU of the first half of each row times the second: [T, 2 D] -> [T, D]."""
        rows, width = x.shape
        out = torch.empty(rows, width // 2)
        self._silu_mul(x.data_ptr(), out.data_ptr(), rows, width // 2, self.threads)
        return out

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """The weights [outputs, inputs] of a product, copied, in their own dtype."""
        outputs, inputs = weight.shape
        narrow = weight.dtype == torch.bfloat16
        together = self.paired if narrow else 1
        behind = -outputs % self._panel
        filled = F.pad(weight, (0, -inputs % together, 0, behind))
        panels = filled.reshape(-1, 2, self._lanes, filled.shape[1] // together, together)
        if narrow and together == 1:
            panels = panels.transpose(1, 2)
        packed = panels.permute(0, 3, 1, 2, 4).clone(memory_format=torch.contiguous_format)
        if bias is not None:
            bias = F.pad(bias.float(), (0, behind)).view(-1, self._panel)
        return Packed(packed.flatten(2), bias, inputs, outputs)

    def linear(self, x: Tensor, weights: Packed, out: Tensor | None = None) -> Tensor:
        """[T, inputs] -> [T, outputs], in `out` if given; a row's result does not depend on the rows beside it."""
        out = torch.empty(len(x), weights.outputs) if out is None else out
        self._multiply(self._linear, x, weights, out.data_ptr())
        return out

    def linear_argmax(self, x: Tensor, weights: Packed) -> Int64:
        """[T, inputs] -> [T] which output of `linear` is the largest, the first of equals; NaN is the lowest number."""
        out = np.empty(x.shape[0], np.int64)
        self._multiply(self._linear_argmax, x, weights, address(out))
        return out

    def _multiply(self, product: Callable[..., None], x: Tensor, weights: Packed, out: int) -> None:
        x, panels, bias = x.contiguous(), weights.panels, weights.bias
        product(
            x.data_ptr(),
            panels.data_ptr(),
            DTYPES[panels.dtype],
            None if bias is None else bias.data_ptr(),
            out,
            *x.shape,
            weights.outputs,
            self.threads,
        )

    def attend(self, batch: Batch, window: int, pool: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes k and v [T, Hkv, D] into the pool, then attends from q [T, Hq, D] -> [T, Hq, D].

        Args:
            batch: of `batch_of`.
            window: positions that a query sees, its own included; 0: all.
            pool: keys and values in the shapes of `pool_shapes`.
            q: contiguous in all but T, as are `k` and `v`.
            k: see q.
            v: see q.
        """
        keys, values = pool
        kv_heads, block_size = keys.shape[1], keys.shape[3]
        out = torch.empty(q.shape)
        shape = Shape(q.shape[1], kv_heads, q.shape[2], block_size, window, DTYPES[keys.dtype], self.threads)
        inputs = Inputs(q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0), out.data_ptr())
        self._attend(byref(batch), byref(shape), byref(inputs), keys.data_ptr(), values.data_ptr())
        return out

    def sample(self, logits: Tensor, table: SamplingTable, slots: Int64, positions: Int64) -> Int64:
        """The tokens [R] at `positions` [R] of `slots` [R]; the logits [R, V] are overwritten."""
        tokens = np.empty(len(slots), np.int64)
        rows, vocabulary = logits.shape
        columns = address(slots), address(positions), rows, address(tokens)
        self._sample(logits.data_ptr(), vocabulary, byref(table), *columns, self.threads)
        return tokens


def batch_of(slots: Int64, num_computed_tokens: Int64, query_lens: Int64, tables: Int64) -> Batch:
    """Rows that compute `query_lens` [R] positions behind `num_computed_tokens` [R]; the arrays must outlive the batch.

    Args:
        slots: [R] of each row.
        num_computed_tokens: see above.
        query_lens: see above.
        tables: [slots, blocks] ids of each slot's blocks.
    """
    return Batch(
        address(slots), address(num_computed_tokens), address(query_lens), len(slots), address(tables), tables.shape[1]
    )


def address(array: npt.NDArray[np.generic]) -> int:
    """Where the numbers of an array lie; 0 if there are none.

    Raises:
        TypeError: the array is not C-contiguous, or not writable.
    """
    return addressof(c_char.from_buffer(array.data)) if array.size else 0  # numpy's own way takes several times as long
