"""Matrix products with weights as integers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed import INTEGERS, Packed, side_by_side
from pagewire.kernels.scales import Multiples
from pagewire.shared.sampling_parameters import NOT_FINITE
from tests.kernels.cpu.test_linear import random

CHUNK = 32
PAIRS = 4
"""Pairs of quads in a chunk."""
ONE = 128
RATIOS = {4: 16, 5: 3, 6: 3, 8: 7}
"""By bits, how much of the number that two inputs share belongs to the second."""
STEPS = {4: 119 * ONE, 5: 126 * ONE, 6: 126 * ONE, 8: 60 * ONE}
"""By bits, the integer to which the largest input of a chunk is rounded."""

Stored = Literal["float16", "float32", "multiples"]
"""Types that store scales and minima."""


@dataclass(frozen=True)
class Weights:
    codes: Tensor
    bits: int
    scales: Tensor | Multiples
    zero: int
    minima: Tensor | Multiples | None
    bias: Tensor | None = None

    def packed(self, kernels: CpuKernels) -> Packed:
        return kernels.pack_integers(self.codes, self.bits, self.scales, self.zero, self.minima, self.bias)

    def in_floats(self) -> "Weights":
        """Equal scales that are no multiples."""
        minima = None if self.minima is None else self.minima.float()
        return replace(self, scales=self.scales.float(), minima=minima)

    def magnitudes(self) -> Tensor:
        """Magnitudes that are added up for each weight."""
        size = self.codes.shape[1] // self.scales.shape[1]
        scales = self.scales.float().abs().double().repeat_interleave(size, 1)
        minima = 0.0 if self.minima is None else self.minima.float().abs().double().repeat_interleave(size, 1)
        return scales * self.codes.double() + minima

    def dequantized(self) -> Tensor:
        size = self.codes.shape[1] // self.scales.shape[1]
        scales = self.scales.float().double().repeat_interleave(size, 1)
        minima = 0.0 if self.minima is None else self.minima.float().double().repeat_interleave(size, 1)
        return scales * (self.codes.double() - self.zero) + minima


def weights(
    outputs: int,
    inputs: int,
    bits: int = 8,
    group: int | None = None,
    minima: bool = False,
    biased: bool = False,
    stored: Stored = "float16",
) -> Weights:
    groups = inputs // (group or inputs)
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, generator=generator)

    def numbers(seed: int) -> Tensor | Multiples:
        values = random(outputs, groups, seed=seed) / 64
        if stored == "multiples":
            together = next(size for size in (8, 4, 2, 1) if groups % size == 0)
            factors = torch.randint(-128, 128, (outputs, groups), dtype=torch.int8, generator=generator)
            return Multiples(factors, values[:, ::together].half() / 64)
        return values.half().float() if stored == "float16" else values

    zero = 0 if minima else 1 << bits - 1
    bias = random(outputs, seed=3) if biased else None
    return Weights(codes, bits, numbers(1), zero, numbers(2) if minima else None, bias)


def largest(bits: int) -> tuple[Tensor, Weights]:
    """Returns rows and weights with the largest integers: common ones are largest halfway between two integers."""
    codes = torch.full((70, 64), (1 << bits) - 1, dtype=torch.uint8)
    x = torch.full((4, 64), STEPS[bits] - ONE / 2)
    x[1::2] *= -1
    x[2:] -= 1
    x[:, ::CHUNK] = STEPS[bits]
    return x, Weights(codes, bits, torch.ones(70, 1), 0, None)


def multiply(x: Tensor, matrix: Weights) -> Tensor:
    """Returns the product in float64 of the rounded rows.

    Of two inputs, the first is `ONE * first + common` and the second `ONE * second + ratio * common`, times the scale
    of their chunk.
    """
    bits, zero, ratio = matrix.bits, matrix.zero, RATIOS[matrix.bits]
    chunks = torch.nn.functional.pad(x, (0, -x.shape[1] % CHUNK)).view(len(x), -1, CHUNK)
    most = chunks.abs().amax(2, keepdim=True)
    factors = torch.where(most > 0, torch.tensor(float(STEPS[bits])).div(most), 0.0)  # STEPS / most would round twice
    numbers = (chunks * factors).round().long()
    a, b = numbers.view(len(x), -1, 2, PAIRS // 2, 2, 4).unbind(-2)  # [rows, chunks, halves, pairs, 4]
    ones = (ratio * a - b + ONE // 2) // ONE
    a = a - ((ratio * a - b - ONE * ones) * ((ratio << 16) // (ratio * ratio + 1)) + (1 << 15)) // (1 << 16)
    first = (a + ONE // 2) // ONE
    common, second = a - ONE * first, ratio * first - ones

    padded = torch.nn.functional.pad(matrix.codes, (0, -x.shape[1] % CHUNK)).long()
    low, high = padded.view(len(padded), -1, 2, PAIRS // 2, 2, 4).unbind(-2)
    if bits == 8:
        blend, part = low, 8
        for _ in range(3):
            blend = (blend + high + 1) // 2
    else:
        blend, part = low + ratio * high, 1

    def dot(numbers: Tensor, codes: Tensor) -> Tensor:
        return torch.einsum("rchpi,nchpi->rnch", numbers.double(), codes.double())

    sums = (dot(first, low) + dot(second, high)) * (ONE // part) + dot(common, blend)
    totals = ((first + second) * (ONE // part) + common * ((1 + ratio) // part)).sum((3, 4))[:, None].double()
    groups = matrix.scales.shape[1]
    halves = padded.shape[1] // 16 if groups == 1 else x.shape[1] // 16 // groups

    def spread(stored: Tensor | Multiples) -> Tensor:
        each = stored.float().double().repeat_interleave(halves, 1)
        return torch.nn.functional.pad(each, (0, sums.shape[2] * 2 - each.shape[1])).view(1, len(padded), -1, 2)

    sums = (sums - zero * totals) * spread(matrix.scales)
    if matrix.minima is not None:
        sums += totals * spread(matrix.minima)
    scales = (most / STEPS[bits]).double() * part
    return (sums.sum(3) * scales[:, None, :, 0]).sum(2)


SHAPES = st.one_of(
    st.tuples(st.integers(1, 9).map(lambda chunks: 32 * chunks), st.sampled_from([16, 32, None])),
    st.tuples(st.integers(1, 3).map(lambda groups: 128 * groups), st.sampled_from([64, 128])),
    st.tuples(st.integers(1, 9).map(lambda halves: 16 * halves), st.just(16)),
    st.tuples(st.integers(1, 3).map(lambda steps: 256 * steps), st.sampled_from([16, 32])),
    st.tuples(st.integers(1, 130), st.none()),
)
PRODUCTS: Mapping[str, st.SearchStrategy[Any]] = {
    "rows": st.integers(1, 40),
    "outputs": st.integers(1, 150),
    "shape": SHAPES,
    "bits": st.sampled_from(list(INTEGERS)),
    "minima": st.booleans(),
}


@settings(max_examples=120, deadline=None)
@given(**PRODUCTS, biased=st.booleans(), stored=st.sampled_from(["float16", "float32", "multiples"]))
def test_products_equal_float64_of_rounded_rows(
    kernels: CpuKernels,
    rows: int,
    outputs: int,
    shape: tuple[int, int | None],
    bits: int,
    minima: bool,
    biased: bool,
    stored: Stored,
) -> None:
    inputs, group = shape
    x, given_weights = random(rows, inputs), weights(outputs, inputs, bits, group, minima, biased, stored)
    expected = multiply(x, given_weights)
    if given_weights.bias is not None:
        expected += given_weights.bias.double()
    out = kernels.linear(x, given_weights.packed(kernels))
    bound = 2**-20 * (x.double().abs() @ given_weights.magnitudes().T + expected.abs())
    assert ((out.double() - expected).abs() <= bound).all()


@settings(max_examples=120, deadline=None)
@given(**PRODUCTS)
def test_multiples_give_the_bits_of_floats(
    kernels: CpuKernels, rows: int, outputs: int, shape: tuple[int, int | None], bits: int, minima: bool
) -> None:
    inputs, group = shape
    x, ids = random(rows, inputs), torch.arange(outputs)
    both = weights(outputs, inputs, bits, group, minima, stored="multiples")
    packed, expected = both.packed(kernels), both.in_floats().packed(kernels)
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x, expected))
    assert kernels.linear_argmax(x, packed).tolist() == kernels.linear_argmax(x, expected).tolist()
    assert torch.equal(kernels.embed(packed, ids), kernels.embed(expected, ids))


@pytest.mark.parametrize(("factors", "steps"), [((4, 8), (3, 1)), ((4, 9), (4, 2)), ((4, 6), (4, 2)), ((4, 2), (4, 4))])
def test_multiples_that_do_not_fit_their_steps_are_refused(factors: tuple[int, int], steps: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Multiples(torch.zeros(factors, dtype=torch.int8), torch.zeros(steps, dtype=torch.float16))


@pytest.mark.parametrize("bits", INTEGERS)
@pytest.mark.parametrize(("inputs", "group"), [(16, 16), (32, 32), (32, None)])
def test_the_sum_of_a_chunk_is_exact(kernels: CpuKernels, bits: int, inputs: int, group: int | None) -> None:
    """Rows whose scale is 1, and scales that are powers of two: only the result is rounded."""
    steps = STEPS[bits]
    x = torch.randint(-steps, steps + 1, (7, inputs), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::16] = steps
    given_weights = weights(70, inputs, bits, group)
    scales = torch.exp2(random(*given_weights.scales.shape).round().clamp(-1, 1))
    exact = Weights(given_weights.codes, bits, scales, 0, None)
    assert torch.equal(kernels.linear(x, exact.packed(kernels)), multiply(x, exact).float())


@pytest.mark.parametrize("bits", INTEGERS)
def test_largest_codes_do_not_overflow(kernels: CpuKernels, bits: int) -> None:
    x, full = largest(bits)
    assert torch.equal(kernels.linear(x, full.packed(kernels)), multiply(x, full).float())


@pytest.mark.parametrize("bits", INTEGERS)
def test_errors_are_less_than_a_third_of_8_bit_errors(kernels: CpuKernels, bits: int) -> None:
    x, matrix = random(50, 640), weights(200, 640, bits, 32)
    chunks = x.view(50, -1, CHUNK)
    steps = chunks.abs().amax(2, keepdim=True) / 127
    coarse = ((chunks / steps).round() * steps).view_as(x).double()
    exact = x.double() @ matrix.dequantized().T
    errors = kernels.linear(x, matrix.packed(kernels)).double() - exact
    assert errors.norm() < (coarse @ matrix.dequantized().T - exact).norm() / 3


@pytest.mark.parametrize("stored", ["float32", "multiples"])
@pytest.mark.parametrize(("bits", "group", "minima"), [(8, None, False), (4, 32, True), (6, 16, False), (5, 64, True)])
def test_a_row_depends_on_neither_neighbours_nor_threads(
    kernels: CpuKernels, many_threads: CpuKernels, bits: int, group: int | None, minima: bool, stored: Stored
) -> None:
    x, packed = random(61, 320), weights(500, 320, bits, group, minima, stored=stored).packed(kernels)
    together = kernels.linear(x, packed)
    for count in (1, 2, 5, 6, 7, 16, 30):
        for first in range(0, 61 - count, 7):
            assert torch.equal(kernels.linear(x[first : first + count], packed), together[first : first + count])
    assert torch.equal(many_threads.linear(x, packed), together)
    assert kernels.linear_argmax(x, packed).tolist() == together.argmax(1).tolist()
    assert many_threads.linear_argmax(x, packed).tolist() == together.argmax(1).tolist()


def test_weights_side_by_side_give_their_products(kernels: CpuKernels) -> None:
    x = random(9, 64)
    parts = [
        weights(40, 64, 4, 32, minima=True).packed(kernels),
        kernels.pack(random(33, 64), random(33)),
        weights(5, 64, 6, 16, biased=True).packed(kernels),
        weights(37, 64, 5, 16, minima=True, stored="multiples").packed(kernels),
    ]
    expected = torch.cat([kernels.linear(x, part) for part in parts], dim=1)
    assert torch.equal(kernels.linear(x, side_by_side(parts)), expected)


@pytest.mark.parametrize("stored", ["float16", "float32", "multiples"])
@pytest.mark.parametrize("bits", INTEGERS)
@pytest.mark.parametrize(("inputs", "group"), [(96, 32), (48, 16), (50, None), (256, 16)])
def test_an_embedding_gives_the_dequantized_rows(
    kernels: CpuKernels, bits: int, inputs: int, group: int | None, stored: Stored
) -> None:
    table = weights(70, inputs, bits, group, minima=bits < 6, stored=stored)
    ids = torch.tensor([0, 69, 15, 16, 31, 32, 33, 5, 5])
    rows = kernels.embed(table.packed(kernels), ids)
    torch.testing.assert_close(rows.double(), table.dequantized()[ids], rtol=1e-6, atol=1e-7)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("broken", [INF, -INF, NAN])
def test_nan_and_infinity_stay_visible(kernels: CpuKernels, broken: float) -> None:
    x, packed = random(3, 96), weights(40, 96, 4, 32).packed(kernels)
    x[1, 40] = broken
    out = kernels.linear(x, packed)
    assert out.isfinite().all(1).tolist() == [True, False, True]
    assert kernels.linear_argmax(x, packed)[1] == NOT_FINITE


def test_zeros_and_tiny_numbers_give_zeros(kernels: CpuKernels) -> None:
    packed = weights(40, 64, 4, 32, minima=True).packed(kernels)
    assert kernels.linear(torch.zeros(1, 64), packed).eq(0).all()
    assert kernels.linear(torch.full((1, 64), 1e-40), packed).eq(0).all()
