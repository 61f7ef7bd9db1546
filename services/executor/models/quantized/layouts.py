"""Weights as small integers with scales: the one form into which every format of quantized integers is read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels.scales import Multiples

BITS = (4, 5, 6, 8)
"""Sizes of a code that the CPU kernels keep packed. Smaller codes are stored in four bits."""
SMALLEST_GROUP = 16
GROUP = 32
"""Groups are of 16 inputs, of a multiple of 32, or a whole row."""


@dataclass(frozen=True, slots=True)
class IntegerWeights:
    """The weights [N, K] of a matrix product with N outputs and K inputs.

    With g = k // group_size, weight[n, k] = scales[n, g] * (codes[n, k] - zero) + minima[n, g].

    Raises:
        ValueError: the tensors do not fit together, or the kernels have no such group size or number of bits.
    """

    codes: Tensor
    """uint8 [N, K], each below 2**bits."""
    bits: int
    """One of `BITS`."""
    scales: Tensor | Multiples
    """Float32 [N, groups], or multiples of steps."""
    zero: int = 0
    """The code of 0 without minima, for all groups: 8 for symmetric codes of four bits, 128 for eight."""
    minima: Tensor | Multiples | None = None
    """Like `scales`; None: all are 0."""

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        groups = self.scales.shape[1]
        if self.bits not in BITS or self.codes.dtype != torch.uint8 or not 0 <= self.zero < 1 << self.bits:
            raise ValueError(f"codes of {self.bits} bits in {self.codes.dtype} around {self.zero} are not supported")
        if self.scales.shape[0] != outputs or inputs % groups or not is_group_size(inputs // groups, inputs):
            raise ValueError(f"scales of shape {list(self.scales.shape)} do not fit weights {[outputs, inputs]}")
        if self.minima is not None and self.minima.shape != self.scales.shape:
            raise ValueError(f"minima of shape {list(self.minima.shape)}, scales of {list(self.scales.shape)}")

    @classmethod
    def with_zeros(cls, codes: Tensor, bits: int, scales: Tensor, zeros: Tensor) -> "IntegerWeights":
        """Returns weights with a zero per group: scales[n, g] * (codes[n, k] - zeros[n, g]).

        Args:
            codes: see `codes`.
            bits: see `bits`.
            scales: float32 [N, groups].
            zeros: integers [N, groups] of any dtype, from 0 to 2**bits.
        """
        first = int(zeros.flatten()[0])
        if first < 1 << bits and bool((zeros == first).all()):
            return cls(codes, bits, scales, first)
        return cls(codes, bits, scales, 0, -zeros.float() * scales)

    @classmethod
    def concatenated(cls, several: Sequence["IntegerWeights"]) -> "IntegerWeights":
        """Returns the rows of all, one after the other; they have the same `layout`."""
        first = several[0]
        minima = (
            None if first.minima is None else _concatenated([one.minima for one in several if one.minima is not None])
        )
        scales = _concatenated([one.scales for one in several])
        return cls(torch.cat([one.codes for one in several]), first.bits, scales, first.zero, minima)

    @property
    def layout(self) -> tuple[object, ...]:
        """The properties that weights need to share for one product."""
        scales, minima = (
            one.together if isinstance(one, Multiples) else type(one) for one in (self.scales, self.minima)
        )
        return self.bits, self.group_size, self.zero, scales, minima

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def rows(self, order: Tensor) -> "IntegerWeights":
        """Returns the rows at the indices `order`."""
        minima = None if self.minima is None else self.minima[order]
        return IntegerWeights(self.codes[order], self.bits, self.scales[order], self.zero, minima)

    def columns(self, inputs: range) -> "IntegerWeights":
        """Returns the weights of successive inputs, which are whole groups if there are several."""
        codes = self.codes[:, inputs.start : inputs.stop]
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes)
        groups = range(inputs.start // self.group_size, inputs.stop // self.group_size)
        minima = None if self.minima is None else _some_groups(self.minima, groups)
        return replace(self, codes=codes, scales=_some_groups(self.scales, groups), minima=minima)

    def dequantize(self) -> Tensor:
        """Returns the weights as float32 [N, K]."""
        outputs, inputs = self.codes.shape
        groups = self.codes.view(outputs, -1, self.group_size).float().sub_(self.zero)
        groups *= self.scales.float()[:, :, None]
        if self.minima is not None:
            groups += self.minima.float()[:, :, None]
        return groups.view(outputs, inputs)


def _concatenated(scales: Sequence[Tensor | Multiples]) -> Tensor | Multiples:
    multiples = [one for one in scales if isinstance(one, Multiples)]
    return Multiples.concatenated(multiples) if multiples else torch.cat([one.float() for one in scales])


def _some_groups(scales: Tensor | Multiples, groups: range) -> Tensor | Multiples:
    return scales.columns(groups) if isinstance(scales, Multiples) else scales[:, groups.start : groups.stop]


def is_group_size(size: int, inputs: int) -> bool:
    """Returns whether the kernels support groups of `size` among `inputs` in a row."""
    return size in (SMALLEST_GROUP, inputs) or size % GROUP == 0
