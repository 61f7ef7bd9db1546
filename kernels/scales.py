"""Scales and minima of integer weights in two levels."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Multiples:
    """Numbers [N, groups] as whole multiples of steps, each of which several groups of a row share.

    With s = g // together, numbers[n, g] = factors[n, g] * steps[n, s].

    Raises:
        ValueError: the tensors do not fit together, or `together` is no power of two.
    """

    factors: Tensor
    """int8 [N, groups]."""
    steps: Tensor
    """float16 [N, groups / together]."""

    def __post_init__(self) -> None:
        factors, steps = (tensor.shape for tensor in (self.factors, self.steps))
        if factors != (steps[0], steps[1] * self.together) or self.together.bit_count() != 1:
            raise ValueError(f"factors of shape {list(factors)} do not fit steps of {list(steps)}")

    def __getitem__(self, rows: Tensor) -> "Multiples":
        return Multiples(self.factors[rows], self.steps[rows])

    def columns(self, groups: range) -> "Multiples":
        """Returns the numbers of successive groups. As many of these share a step as do so evenly."""
        together = gcd(self.together, groups.start, groups.stop)
        steps = self.steps[:, groups.start // self.together : -(-groups.stop // self.together)]
        spread = steps.repeat_interleave(self.together // together, 1)
        first = groups.start % self.together // together
        return Multiples(
            self.factors[:, groups.start : groups.stop], spread[:, first : first + len(groups) // together]
        )

    @property
    def shape(self) -> torch.Size:
        """Shape of the numbers, [N, groups]."""
        return self.factors.shape

    @property
    def together(self) -> int:
        """Number of groups that share a step."""
        return self.factors.shape[1] // self.steps.shape[1]

    @classmethod
    def concatenated(cls, several: Sequence["Multiples"]) -> "Multiples":
        """Returns the rows of all, one after the other; each has as many steps."""
        return cls(torch.cat([one.factors for one in several]), torch.cat([one.steps for one in several]))

    def float(self) -> Tensor:
        """Returns the numbers in float32, which holds them exactly."""
        return self.steps.float().repeat_interleave(self.together, 1) * self.factors
