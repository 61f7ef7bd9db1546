"""Layers that several model families use."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.kernels.activation import Activation
from pagewire.services.executor.models.spec import Storage

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
}


class Stored(NamedTuple):
    """A tensor of a checkpoint that is a part of a parameter."""

    name: str
    """Name of the tensor; for a `PackedLinear` relative to the module's parent, for `ExpertWeights` to the module."""
    parameter: str
    shape: tuple[int, ...]
    """Shape of the tensor in the checkpoint."""
    part: Callable[[Tensor], Tensor]
    """Returns the view of the parameter that the tensor fills, with as many numbers in the same order."""
    in_rows: bool = True
    """Whether the view is rows of the parameter, as they are stored; otherwise it is all of the parameter."""


def embedding(entries: int, width: int) -> nn.Embedding:
    """Returns an uninitialised embedding: torch's random values would load its compiler, which takes seconds."""
    return nn.Embedding(entries, width, _weight=torch.empty(entries, width))


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich, 2019) over the last dimension."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        """`offset` is added to the weights."""
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(width))

    @property
    def scale(self) -> Tensor:
        """Float32 factors of the features [width]."""
        return self.weight.float() + self.offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        if self.offset:  # a weight near 0 plus 1 does not fit the dtype of the weights
            return F.rms_norm(x.float(), self.weight.shape, self.scale, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + residual and the sum itself, which may overwrite `residual`. All are [T, width]."""
        total = x + residual
        return self(total), total


class LayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al., 2016) with weight and bias."""

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + residual and the sum itself, as `RMSNorm` does."""
        total = x + residual
        return self(total), total


class PackedLinear(nn.Module):
    """A matrix product whose weights the checkpoint stores otherwise, such as several projections of one input.

    It stores `q_proj.weight`, `k_proj.weight` and `v_proj.weight` for module `qkv_proj` with these three parts.
    """

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        bias: bool,
        storage: Storage = Storage.PARTS,
        by_head: tuple[int, int] = (1, 1),
    ) -> None:
        """`by_head` is the number of heads and the size of each, for `Storage.BY_HEAD`."""
        super().__init__()
        self.parts = dict(parts)
        """Name in the checkpoint and number of outputs of each projection, in order."""
        self._storage, self._by_head = storage, by_head
        outputs = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs of all parts]."""
        return F.linear(x, self.weight, self.bias)

    def stored(self) -> Iterator[Stored]:
        """Yields the tensors of the checkpoint that the weights consist of."""
        for kind, parameter in self.named_parameters(recurse=False):
            first = 0
            for name, outputs in self.parts.items():
                shape = (outputs, *parameter.shape[1:])
                if kind == "weight" and self._storage is Storage.TRANSPOSED:
                    shape = (shape[1], shape[0])
                moved = self._storage is Storage.BY_HEAD or (self._storage is Storage.TRANSPOSED and kind == "weight")
                yield Stored(f"{name}.{kind}", kind, shape, self._view(kind, first, outputs), not moved)
                first += outputs

    def _view(self, kind: str, first: int, outputs: int) -> Callable[[Tensor], Tensor]:
        def part(parameter: Tensor) -> Tensor:
            rows = parameter.narrow(0, first, outputs)
            if self._storage is Storage.TRANSPOSED and kind == "weight":
                return rows.t()
            if self._storage is Storage.BY_HEAD:
                return rows.view(-1, *self._by_head, *rows.shape[1:]).transpose(0, 1)
            return rows

        return part


class Activate(nn.Module):
    """The activation of a feed-forward layer."""

    def __init__(self, kind: Activation, *, gated: bool) -> None:
        super().__init__()
        self.kind, self.gated = kind, gated

    def forward(self, x: Tensor) -> Tensor:
        """[T, inner], or [T, 2 inner], gates before values -> [T, inner]."""
        if not self.gated:
            return ACTIVATIONS[self.kind](x)
        gate, up = x.chunk(2, dim=-1)
        return ACTIVATIONS[self.kind](gate) * up
