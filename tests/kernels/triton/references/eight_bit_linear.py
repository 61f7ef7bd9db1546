"""The product of eight-bit numbers in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.layers.eight_bit_linear import EightBitMatrix


def reference(
    x: torch.Tensor, x_scales: torch.Tensor, weights: EightBitMatrix, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns `eight_bit_linear` in float64."""
    group = weights.group
    left = (x.double().view(len(x), -1, group) * x_scales.double()[:, :, None]).flatten(1)
    right = weights.values.double().view(len(weights.values), -1, group) * weights.scales.T.double()[:, :, None]
    product = left @ right.flatten(1).T
    return product if bias is None else product + bias.double()
