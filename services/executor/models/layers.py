"""Layers that several model families use."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def embedding(entries: int, width: int) -> nn.Embedding:
    """Returns an uninitialised embedding: torch's random values would load its compiler, which takes seconds."""
    return nn.Embedding(entries, width, _weight=torch.empty(entries, width))


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich, 2019) over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + residual and the sum itself, which may overwrite `residual`. All are [T, width]."""
        total = x + residual
        return self(total), total


class PackedLinear(nn.Module):
    """Several projections of one input, computed as one matrix product.

    The checkpoint stores them separately: `q_proj.weight`, `k_proj.weight` and `v_proj.weight` for module `qkv_proj`.
    """

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool) -> None:
        super().__init__()
        self.parts = dict(parts)
        """Name in the checkpoint and number of outputs of each projection, in order."""
        outputs = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs of all parts]."""
        return F.linear(x, self.weight, self.bias)


class SiluMul(nn.Module):
    """The activation of the gated feed-forward layer."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, 2 inner], gates before values -> [T, inner]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class GatedMLP(nn.Module):
    """SwiGLU feed-forward layer (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = PackedLinear(width, {"gate_proj": inner, "up_proj": inner}, bias)
        self.activation = SiluMul()
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]."""
        out: Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return out
