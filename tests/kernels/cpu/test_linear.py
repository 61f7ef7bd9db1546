"""Matrix products with packed weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed import DTYPES
from pagewire.shared.sampling_parameters import NOT_FINITE


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(kernels: CpuKernels, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` as it is multiplied with weights of a dtype."""
    return x.bfloat16() if dtype == torch.bfloat16 and kernels.paired > 1 else x


PRODUCTS = {
    "rows": st.one_of(st.integers(1, 14), st.integers(15, 70)),
    "inputs": st.integers(1, 130),
    "outputs": st.one_of(st.integers(1, 70), st.integers(71, 1500)),
    "dtype": st.sampled_from(list(DTYPES)),
    "biased": st.booleans(),
}


@settings(max_examples=80, deadline=None)
@given(**PRODUCTS)
def test_products_equal_float64(
    kernels: CpuKernels, rows: int, inputs: int, outputs: int, dtype: torch.dtype, biased: bool
) -> None:
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1).to(dtype)
    bias = random(outputs, seed=2).to(dtype) if biased else None
    out = kernels.linear(x, kernels.pack(weight, bias))
    expected = rounded(kernels, x, dtype).double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(
    kernels: CpuKernels, many_threads: CpuKernels, dtype: torch.dtype
) -> None:
    x, packed = random(61, 200), kernels.pack(random(500, 200, seed=1).to(dtype))
    together = kernels.linear(x, packed)
    for count in (1, 2, 5, 12, 13, 30):
        for first in range(0, 61 - count, 7):
            assert torch.equal(kernels.linear(x[first : first + count], packed), together[first : first + count])
    assert torch.equal(many_threads.linear(x, packed), together)


@settings(max_examples=80, deadline=None)
@given(**PRODUCTS, equal=st.booleans())
def test_argmax_is_the_first_of_the_largest_outputs(
    kernels: CpuKernels,
    many_threads: CpuKernels,
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    biased: bool,
    equal: bool,
) -> None:
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1).to(dtype)
    if equal:
        x, weight = x.sign(), weight.sign()  # so that many outputs are the same
    packed = kernels.pack(weight, random(outputs, seed=2).to(dtype) if biased else None)
    expected = kernels.linear(x, packed).numpy().argmax(axis=1).tolist()
    assert kernels.linear_argmax(x, packed).tolist() == expected
    assert many_threads.linear_argmax(x, packed).tolist() == expected


@pytest.mark.parametrize("rows", [1, 12, 30])
def test_products_of_more_panels_than_a_thread_takes_are_right(
    kernels: CpuKernels, many_threads: CpuKernels, rows: int
) -> None:
    """So many inputs that no two panels stay in the cache together, and more panels than there are chunks."""
    x, weight = random(rows, 1100), random(5000, 1100, seed=1).bfloat16()
    packed = kernels.pack(weight)
    expected = rounded(kernels, x, weight.dtype).double() @ weight.double().T
    for these in (kernels, many_threads):
        out = these.linear(x, packed)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        assert these.linear_argmax(x, packed).tolist() == out.argmax(1).tolist()


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, NAN, 2.0], NOT_FINITE),
        ([NAN, NAN, NAN], NOT_FINITE),
        ([-INF, NAN, -INF], NOT_FINITE),
        ([*[0.0] * 3000, NAN, *[0.0] * 3000], NOT_FINITE),
        ([-INF, -INF], NOT_FINITE),
        ([1.0, INF, INF], NOT_FINITE),
        ([-INF, torch.finfo(torch.float32).max], 1),
        ([*[0.0] * 3000, 1.0, *[0.0] * 3000], 3000),
    ],
)
def test_argmax_marks_rows_that_are_not_finite(kernels: CpuKernels, values: list[float], expected: int) -> None:
    packed = kernels.pack(torch.zeros(len(values), 4), torch.tensor(values))
    assert kernels.linear_argmax(random(13, 4), packed).tolist() == [expected] * 13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_lose_nothing_on_the_way(kernels: CpuKernels, dtype: torch.dtype) -> None:
    weight = (40 * random(100, 64)).round().to(dtype)  # up to the last bit that bf16 has for whole numbers
    x = random(20, 64, seed=1).round()  # sums of whole numbers are the same in every order
    assert torch.equal(kernels.linear(x, kernels.pack(weight)), kernels.linear(x, kernels.pack(weight.float())))


def test_an_odd_number_of_inputs_is_multiplied_without_later_memory(kernels: CpuKernels) -> None:
    x, weight = random(3, 63), random(40, 64, seed=1).bfloat16()
    kernels.linear(torch.full((3, 64), NAN), kernels.pack(weight))  # the next product takes over its memory
    assert kernels.linear(x, kernels.pack(weight[:, :63])).isfinite().all()


def test_input_rows_may_lie_apart(kernels: CpuKernels) -> None:
    x, packed = random(8, 100), kernels.pack(random(40, 50))
    assert torch.equal(kernels.linear(x[:, :50], packed), kernels.linear(x[:, :50].clone(), packed))


def test_packed_weights_are_a_copy(kernels: CpuKernels) -> None:
    weight, x = random(40, 50), random(1, 50)
    packed = kernels.pack(weight)
    before = kernels.linear(x, packed)
    weight.fill_(0)
    assert torch.equal(kernels.linear(x, packed), before)
