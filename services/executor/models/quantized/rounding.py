"""Rounds plain weights to integers with scales per group of inputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagewire.kernels.scales import Multiples
from pagewire.services.executor.models.quantized.layouts import GROUP, IntegerWeights

SMALLEST = 2.0**-16
"""Smallest scale that is stored as float16, which has fewer than eight bits of a smaller number."""
SMALLEST_STEP = 2.0**-19
"""Smallest step that is stored as float16, which rounds a smaller one by more than a 64th."""
FEW, MANY = 8, 64
"""Fewest and most groups of a row whose scales are multiples of one step: with fewer, steps take too much memory; with
more, multiples are too coarse."""


def round_weights(weight: Tensor, bits: int) -> IntegerWeights:
    """Returns weights [N, K] in 8 bits, or in 4 or 6 if K is a multiple of `GROUP`.

    Scales and minima are multiples of steps or float16 numbers where that is possible, because reading them takes time.
    """
    outputs, inputs = weight.shape
    size, bits = (inputs, 8) if inputs % GROUP else (GROUP, bits)
    groups = weight.float().view(outputs, -1, size)
    return _between_extremes(groups) if bits == 4 else _around_zero(groups, bits)


def _around_zero(groups: Tensor, bits: int) -> IntegerWeights:
    """Rounds to as many steps up to the largest weight of a group, 31 or 127, as down."""
    middle = 1 << (bits - 1)
    scales = _stored(groups.abs().amax(2) / (middle - 1), torch.ceil)
    codes = _codes(groups, scales.float(), 1 - middle, middle - 1).add_(middle)
    return IntegerWeights(codes.to(torch.uint8), bits, scales, zero=middle)


def _between_extremes(groups: Tensor) -> IntegerWeights:
    """Rounds to 15 steps from the least to the largest weight of a group."""
    least, most = groups.aminmax(dim=2)
    minima = _stored(least, torch.round)
    scales = _stored((most - minima.float()) / 15, torch.round)
    codes = _codes(groups - minima.float()[:, :, None], scales.float(), 0, 15)
    return IntegerWeights(codes.to(torch.uint8), 4, scales, minima=minima)


def _stored(numbers: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor | Multiples:
    """Returns [N, groups] as multiples; as they are where groups are few or steps too small for float16."""
    outputs, groups = numbers.shape
    together = min(groups & -groups, MANY)  # the largest power of two that divides the groups
    several = numbers.view(outputs, -1, together)
    largest = several.abs().amax(2)
    steps = (largest / 127).half()
    if together < FEW or not bool(((steps >= SMALLEST_STEP) & steps.isfinite() | (largest == 0)).all()):
        return _shortened(numbers)
    factors = rounded(several / steps.float().clamp_min(SMALLEST_STEP)[:, :, None]).clamp_(-127, 127)
    return Multiples(factors.to(torch.int8).view(outputs, groups), steps)


def _codes(groups: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """Returns [N, groups, size] in steps of `scales` [N, groups], as float32 [N, K]."""
    steps = scales.clamp_min(torch.finfo(torch.float32).tiny)[:, :, None]
    return (groups / steps).round_().clamp_(least, most).flatten(1)


def _shortened(numbers: Tensor) -> Tensor:
    return torch.where(numbers.abs() < SMALLEST, numbers, numbers.half().float())
