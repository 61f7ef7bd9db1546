"""Rounds plain weights to integers with scales."""

import torch
from torch import Tensor

from pagewire.services.executor.models.quantized.layouts import GROUP, IntegerWeights


def round_weights(weight: Tensor, bits: int) -> IntegerWeights:
    """Returns weights [N, K] in 8 bits per output, or in 4 bits per `GROUP` inputs if K is a multiple of that."""
    whole = weight.shape[1] % GROUP == 0
    return _round_to_int4(weight.float()) if bits == 4 and whole else _round_to_int8(weight.float())


def _round_to_int8(weight: Tensor) -> IntegerWeights:
    """Per output, 127 steps up to the largest weight and as many down."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().add_(128).to(torch.uint8)
    return IntegerWeights(codes, 8, scales, zero=128)


def _round_to_int4(weight: Tensor) -> IntegerWeights:
    """Per group, 15 steps from the least to the largest weight, in float16, which the kernels read in half the time."""
    groups = weight.view(len(weight), -1, GROUP)
    least, most = groups.aminmax(dim=2)
    minima = least.half().float()
    scales = ((most - minima) / 15).half().float()
    codes = (groups - minima[:, :, None]) / scales.clamp_min(torch.finfo(torch.float16).tiny)[:, :, None]
    return IntegerWeights(codes.round_().clamp_(0, 15).to(torch.uint8).view_as(weight), 4, scales, minima=minima)
