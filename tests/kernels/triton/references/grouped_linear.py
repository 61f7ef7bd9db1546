"""The products of grouped tokens in PyTorch, which the kernel is compared with."""

import torch


def reference(x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns [T, K, outputs] in float64: the row of each token times the matrices of its experts `chosen` [T, K]."""
    return torch.einsum("ts,tkos->tko", x.double(), weight.double()[chosen])
