"""Rounds plain weights to integers with scales per group of inputs."""

import torch
from torch import Tensor

from pagewire.kernels.scales import Multiples
from pagewire.services.executor.models.quantized.layouts import GROUP, IntegerWeights

SMALLEST = 2.0**-16
"""Below it, float16 has fewer than eight bits of a number, and float32 is kept."""
SMALLEST_STEP = 2.0**-19
"""Below it, float16 rounds a step by more than a 64th."""
FEW, MANY = 8, 64
"""Groups of a row whose scales, in four bits, are multiples of one step: with fewer, steps take too much memory; with
more, multiples are too coarse."""


def round_weights(weight: Tensor, bits: int) -> IntegerWeights:
    """Returns weights [N, K] in 8 bits, or in 4 if K is a multiple of `GROUP`.

    Scales and minima are multiples of steps or float16 numbers where that is possible, because reading them takes time.
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
    minima = _stored(least)
    scales = _stored((most - minima.float()) / 15)
    codes = _codes(groups - minima.float()[:, :, None], scales.float(), 0, 15).to(torch.uint8)
    return IntegerWeights(codes, 4, scales, minima=minima)


def _stored(numbers: Tensor) -> Tensor | Multiples:
    """Returns [N, groups] as multiples; as they are where groups are few or steps too small for float16."""
    outputs, groups = numbers.shape
    together = min(groups & -groups, MANY)  # the largest power of two that divides the groups
    several = numbers.view(outputs, -1, together)
    largest = several.abs().amax(2)
    steps = (largest / 127).half()
    if together < FEW or not bool(((steps >= SMALLEST_STEP) & steps.isfinite() | (largest == 0)).all()):
        return _shortened(numbers)
    factors = (several / steps.float().clamp_min(SMALLEST_STEP)[:, :, None]).round_().clamp_(-127, 127)
    return Multiples(factors.to(torch.int8).view(outputs, groups), steps)


def _codes(groups: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """Returns [N, groups, size] in steps of `scales` [N, groups], as float32 [N, K]."""
    steps = scales.clamp_min(torch.finfo(torch.float32).tiny)[:, :, None]
    return (groups / steps).round_().clamp_(least, most).flatten(1)


def _shortened(numbers: Tensor) -> Tensor:
    return torch.where(numbers.abs() < SMALLEST, numbers, numbers.half().float())
