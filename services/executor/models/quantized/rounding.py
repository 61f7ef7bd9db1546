"""Rounds plain weights to integers with scales per group of inputs."""

import torch
from torch import Tensor

from pagewire.services.executor.models.quantized.layouts import GROUP, IntegerWeights

SMALLEST = 2.0**-16
"""Below it, float16 has fewer than eight bits of a number, and float32 is kept."""


def round_weights(weight: Tensor, bits: int) -> IntegerWeights:
    """Returns weights [N, K] in 8 bits, or in 4 if K is a multiple of `GROUP`.

    Scales and minima are float16 numbers where that is possible, because the kernels read these in half the time.
    """
    outputs, inputs = weight.shape
    size = inputs if inputs % GROUP else GROUP
    groups = weight.float().view(outputs, -1, size)
    return _round_to_int4(groups) if bits == 4 and size == GROUP else _round_to_int8(groups)


def _round_to_int8(groups: Tensor) -> IntegerWeights:
    """127 steps up to the largest weight of a group and as many down."""
    scales = _shortened(groups.abs().amax(2) / 127)
    return IntegerWeights(_codes(groups, scales, -127, 127).add_(128).to(torch.uint8), 8, scales, zero=128)


def _round_to_int4(groups: Tensor) -> IntegerWeights:
    """15 steps from the least to the largest weight of a group."""
    least, most = groups.aminmax(dim=2)
    minima = _shortened(least)
    scales = _shortened((most - minima) / 15)
    codes = _codes(groups - minima[:, :, None], scales, 0, 15).to(torch.uint8)
    return IntegerWeights(codes, 4, scales, minima=minima)


def _codes(groups: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """Returns [N, groups, size] in steps of `scales` [N, groups], as float32 [N, K]."""
    steps = scales.clamp_min(torch.finfo(torch.float32).tiny)[:, :, None]
    return (groups / steps).round_().clamp_(least, most).flatten(1)


def _shortened(numbers: Tensor) -> Tensor:
    return torch.where(numbers.abs() < SMALLEST, numbers, numbers.half().float())
