"""A mixture of experts as one call of the compiled kernels."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from pagewire.kernels.activation import Activation
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed import Matrix, Packed


class Experts(ctypes.Structure):
    """The struct `Experts` of `kernels.hpp`."""

    _fields_ = (
        *((name, POINTER(Matrix)) for name in ("up", "down")),
        *((name, c_int64) for name in ("count", "chosen", "normalized", "activation")),
        *((name, Matrix) for name in ("router", "shared_up", "shared_down", "shared_gate")),
    )


class CompiledExperts:
    """A router and its experts. A token's result does not depend on the other tokens.

    Attributes:
        pointers: the struct that the kernels read. This object must outlive it.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        router: Packed,
        experts: Sequence[tuple[Packed, Packed]],
        shared: tuple[Packed, Packed, Packed] | None,
        activation: Activation,
        chosen: int,
        *,
        normalized: bool,
        first: int = 0,
    ) -> None:
        """No weights have a bias.

        Args:
            kernels: loaded library.
            router: [all experts, D].
            experts: for each expert, its gates and values [2 I, D] and its output [D, I]; of several ranks, each has
                its own successive experts, and adds nothing for the others.
            shared: both of an expert of all tokens, and its gate [1, D], whose sigmoid is the expert's weight.
            activation: is applied to the gates.
            chosen: number of experts per token.
            normalized: whether the weights of a token's experts are divided by their sum.
            first: number of the first of `experts`.
        """
        self._kernels = kernels
        self._weights = (router, experts, shared)  # keeps alive what the structs point to
        own = range(first, first + len(experts))
        ups, downs = (
            [experts[i - first][part].matrix if i in own else _absent(experts[0][part]) for i in range(router.outputs)]
            for part in range(2)
        )
        self._ups, self._downs = (Matrix * len(ups))(*ups), (Matrix * len(downs))(*downs)
        self.pointers = Experts(
            self._ups,
            self._downs,
            len(ups),
            chosen,
            normalized,
            activation,
            router.matrix,
            *([Matrix()] * 3 if shared is None else [part.matrix for part in shared]),
        )
        self._mix = kernels.function("mix_experts", [c_void_p, c_void_p, c_void_p, c_int64, c_int])

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D], float32 and contiguous."""
        out = torch.empty_like(x)
        self._mix(byref(self.pointers), x.data_ptr(), out.data_ptr(), len(x), self._kernels.threads)
        return out


def _absent(like: Packed) -> Matrix:
    """Returns a matrix of the same sizes without weights, in place of another rank's expert."""
    return Matrix(inputs=like.inputs, outputs=like.outputs)
