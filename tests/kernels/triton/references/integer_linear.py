"""The product with integer weights in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.layers.integer_linear import IntegerMatrix


def reference(x: torch.Tensor, weights: IntegerMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns `integer_linear` in float64."""
    bits = 16 // weights.per_word
    words = weights.codes.int()
    parts = [(words >> (bits * part)) & ((1 << bits) - 1) for part in range(weights.per_word)]
    codes = torch.stack(parts, 2).transpose(0, 1).flatten(1)
    groups = (codes.double() - weights.zero).view(weights.outputs, -1, weights.group)
    groups = groups * weights.scales.T.double()[:, :, None]
    if weights.minima is not None:
        groups = groups + weights.minima.T.double()[:, :, None]
    product = x.double() @ groups.flatten(1).T
    return product if bias is None else product + bias.double()
