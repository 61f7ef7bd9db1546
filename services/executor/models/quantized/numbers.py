"""Packed numbers and their scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.services.executor.models.quantized.layouts import IntegerWeights

E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the values of the four-bit float with two bits of exponent; the highest of the four bits is the sign.

Source: OCP Microscaling Formats (MX) Specification 1.0, table 5.
"""
E2M1_BITS = 5
"""Bits of the code that `e2m1_codes` returns."""
E2M1_ZERO = 16
"""The code of 0 among those that `e2m1_codes` returns."""
_CODES = [E2M1_ZERO + sign * value for sign in (1, -1) for value in E2M1_TWICE]
_PAIRS = torch.tensor([(_CODES[byte % 16], _CODES[byte // 16]) for byte in range(256)], dtype=torch.uint8)
E8M0_BIAS = 127
"""Bias of an exponent that is stored as a byte; same source, section 5.4.1."""
_HALVES = torch.tensor([0.5 * 2.0 ** (exponent - E8M0_BIAS) for exponent in range(256)])


@dataclass(frozen=True, slots=True)
class Scaled:
    """The weights (values - zeros) * scales of a matrix [N, K]."""

    values: Tensor
    """[N, K]; uint8 if they are codes."""
    scales: Tensor
    """[R, C]: each belongs to a `block` of rows and columns, which may be cut off at the edge of the matrix."""
    zeros: Tensor | None = None
    """[R, C] or a single number [1, 1]; None: all are 0."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns that share a scale."""

    def dequantize(self) -> Tensor:
        """Returns the weights in float32 [N, K]."""
        values = self.values.float()
        if self.zeros is not None:
            values = values - self._spread(self._spread(self.zeros.float(), 0), 1)
        return values * self._spread(self._spread(self.scales.float(), 0), 1)

    def integers(self, bits: int) -> IntegerWeights:
        """Returns codes of `bits` bits, whose blocks of columns are all of the same size, as integers."""
        scales = self.row_scales()
        zeros = torch.zeros(1, 1) if self.zeros is None else self._spread(self.zeros, 0)
        return IntegerWeights.with_zeros(self.values, bits, scales, zeros.expand_as(scales))

    def row_scales(self) -> Tensor:
        """Returns the scales in float32 [N, C]."""
        return self._spread(self.scales.float(), 0).expand(len(self.values), -1).contiguous()

    def _spread(self, numbers: Tensor, dim: int) -> Tensor:
        """Repeats what belongs to a block for each of its rows or columns; one number is left to broadcasting."""
        size = self.values.shape[dim]
        if numbers.shape[dim] in (1, size):
            return numbers
        return numbers.repeat_interleave(self.block[dim], dim).narrow(dim, 0, size)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Int32 [rows, words] -> uint8 [rows, count]: number i of a row is in the bits from i * bits on, without gaps."""
    period = 32  # so many numbers fill `bits` words
    numbers = torch.empty(len(words), -(-count // period) * period, dtype=torch.uint8)
    words = torch.nn.functional.pad(words, (0, numbers.shape[1] * bits // 32 - words.shape[1]))
    for i in range(period):
        word, shift = divmod(i * bits, 32)
        value = words[:, word::bits] >> shift
        if (low := 32 - shift) < bits:
            value = value & ((1 << low) - 1) | words[:, word + 1 :: bits] << low
        numbers[:, i::period] = value & ((1 << bits) - 1)
    return numbers[:, :count]


def e2m1_codes(pairs: Tensor) -> Tensor:
    """Uint8 [..., n], the low half of a byte before the high one -> uint8 [..., 2 n]: E2M1_ZERO + twice the value."""
    return _PAIRS[pairs.int()].flatten(-2)


def half_of_exponents(stored: Tensor) -> Tensor:
    """Biased exponents as uint8 -> half of the powers of two, in float32: the scales of `e2m1_codes`."""
    return _HALVES[stored.int()]
