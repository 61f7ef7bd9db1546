"""RMSNorm in PyTorch, which the kernel is compared with."""

import torch


def reference(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `out` and the new residual of `rms_norm`, in float64."""
    hidden = x.double() if residual is None else (x.double() + residual.double()).to(x.dtype).double()
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon) * weight.double(), hidden
