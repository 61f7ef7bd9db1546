"""Products of activations and weights of eight bits, and the rounding of activations."""

import pytest
import torch

from pagewire.kernels.triton.layers import eight_bit_linear, round_rows
from pagewire.kernels.triton.layers.eight_bit_linear import EightBitMatrix
from pagewire.kernels.triton.layers.split_inputs import counters_of
from tests.kernels.triton.batches import DEVICE, TOLERANCE, poisoned
from tests.kernels.triton.references import eight_bit_linear as eight_bit_linear_reference
from tests.kernels.triton.references import round_rows as round_rows_reference

DTYPES = (torch.int8, torch.float8_e4m3fn)


def rounded(x: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x, dtype=dtype)
    scales = poisoned(torch.empty(len(x), x.shape[1] // group, device=DEVICE))
    round_rows.round_rows(x, group, out, scales)
    return out, scales


def rows(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)) * torch.arange(1, count + 1)[:, None]
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "group"), [(128, 32), (1100, 1100), (96, 96)])
def test_rounded_rows_equal_the_reference(dtype: torch.dtype, inputs: int, group: int) -> None:
    x = rows(3, inputs)
    x[1] = 0.0
    numbers, scales = rounded(x, group, dtype)
    expected, expected_scales = round_rows_reference.reference(x, group, dtype)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    step = 1.0 if dtype == torch.int8 else 32.0  # of the largest numbers, where a quotient may differ in its last bit
    assert (numbers.float() - expected.float()).abs().max() <= step
    assert (numbers.float() != expected.float()).float().mean() < 0.01
    assert numbers.float().abs().amax(1)[0] == round_rows.LARGEST[dtype]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_no_finite_output(dtype: torch.dtype, lost: float) -> None:
    x = rows(3, 128)
    x[1, 40] = lost
    values = torch.ones(70, 128, dtype=torch.float32).to(dtype).to(DEVICE)
    matrix = EightBitMatrix(values, torch.ones(4, 70, device=DEVICE), counters_of(70, DEVICE))
    out = poisoned(torch.empty(3, 70, device=DEVICE))
    eight_bit_linear.eight_bit_linear(*rounded(x, 32, dtype), matrix, None, out)
    assert out.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inputs", "group"), [(128, 32), (128, 128), (1024, 128)], ids=["groups", "per output", "shared inputs"]
)
@pytest.mark.parametrize("count", [3, 40])
def test_products_equal_the_reference(dtype: torch.dtype, inputs: int, group: int, count: int) -> None:
    random = torch.Generator().manual_seed(group)
    values = (torch.randn(70, inputs, generator=random) * 40).to(dtype)
    every = (torch.rand(inputs // group, 70, generator=random) / 40).to(DEVICE)
    matrix = EightBitMatrix(values.to(DEVICE), every, counters_of(70, DEVICE))
    x, scales = rounded(rows(count, inputs), group, dtype)
    bias = torch.arange(70.0, device=DEVICE) if count == 3 else None
    out = poisoned(torch.empty(count, 70, device=DEVICE))
    eight_bit_linear.eight_bit_linear(x, scales, matrix, bias, out)
    expected = eight_bit_linear_reference.reference(x, scales, matrix, bias)
    rounded_sums = dtype == torch.float8_e4m3fn and torch.cuda.is_available()  # to 14 bits, by sm_90's tensor cores
    limit = 2.0**-12 if rounded_sums else TOLERANCE[torch.float32]
    assert ((out - expected).abs().max() / expected.abs().max()).item() <= limit


def test_groups_that_the_kernel_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 48"):
        eight_bit_linear.tile_of(48)
