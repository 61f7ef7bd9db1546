"""Adapters (LoRA) in the layouts of the compiled kernels, and the rows of a step that they update."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Array, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels, Int64, address
from pagewire.kernels.cpu.packed import Weights, joined
from pagewire.kernels.low_rank import LowRank


class Update(ctypes.Structure):
    """A low-rank update of consecutive outputs of a matrix: the struct of this name in `adapters.hpp`."""

    _fields_ = (("expand", Weights), ("first", c_int64), ("scale", c_double))


class Updates(ctypes.Structure):
    """All updates of one matrix by an adapter."""

    _fields_ = (
        *((name, Weights) for name in ("shrink", "folded")),
        ("ranks", c_int64),
        ("parts", POINTER(Update)),
        ("count", c_int64),
    )


class Adapted(ctypes.Structure):
    """The rows of a step that one adapter updates."""

    _fields_ = (("matrices", POINTER(Updates)), ("rows", c_void_p), ("count", c_int64))


class CompiledAdapter:
    """The packed updates of one adapter."""

    def __init__(
        self, kernels: CpuKernels, updates: Mapping[int, Sequence[LowRank]], matrices: int, dtype: torch.dtype
    ) -> None:
        """`updates` are those of each matrix, by its number below `matrices`. `dtype` is float32 or bfloat16."""
        packed = {
            number: [kernels.pack(factor.to(dtype)) for factor in _factors(kernels, several, dtype)]
            for number, several in sorted(updates.items())
        }
        self._panels = joined([one for several in packed.values() for one in several])
        self._parts: list[Array[Update]] = []  # keeps alive what the structs point to, as `_panels` does
        self.matrices = (Updates * matrices)()
        for number, (whole, folded, *expands) in packed.items():
            parts = (Update * len(expands))(
                *(
                    Update(expand.parts[0], one.first, one.scale)
                    for expand, one in zip(expands, updates[number], strict=True)
                )
            )
            self._parts.append(parts)
            ranks = sum(one.inputs for one in expands)
            self.matrices[number] = Updates(whole.parts[0], folded.parts[0], ranks, parts, len(parts))


def _factors(kernels: CpuKernels, updates: Sequence[LowRank], dtype: torch.dtype) -> list[Tensor]:
    """Returns the factors of one matrix in the order of their use: the first ones, folded, and each second one."""
    shrink = torch.cat([one.shrink for one in updates]).to(dtype)
    return [*kernels.fold(shrink), *(one.expand for one in updates)]


class UpdateKernel:
    """The kernel that adds the updates of a step's adapters to the product of one matrix."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._update = kernels.function(
            "update", [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, ctypes.c_int]
        )

    def __call__(self, adapted: Array[Adapted], matrix: int, x: Tensor, out: Tensor) -> None:
        """Adds to `out` [T, outputs] what the adapters add to the product of the matrix of a number with x [T, inputs].

        Both are contiguous.
        """
        inputs, outputs = (x.data_ptr(), x.shape[1]), (out.data_ptr(), out.shape[1])
        self._update(adapted, len(adapted), matrix, *inputs, *outputs, self._kernels.threads)


class StepAdapters:
    """The adapters of one step.

    Attributes:
        rows: the rows of each adapter.
    """

    def __init__(self, adapters: Sequence[tuple[CompiledAdapter, Int64]]) -> None:
        """`adapters`: each with its ascending rows."""
        self._kept = adapters  # `rows` only points to them
        structs = (Adapted(one.matrices, address(rows), len(rows)) for one, rows in adapters)
        self.rows: Array[Adapted] = (Adapted * len(adapters))(*structs)
