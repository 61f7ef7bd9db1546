"""Products with weights as integers."""

import pytest
import torch

from pagewire.kernels.triton.layers import integer_linear
from pagewire.kernels.triton.layers.integer_linear import IntegerMatrix, pack
from pagewire.kernels.triton.layers.split_inputs import splits_of
from tests.kernels.triton.batches import DEVICE, assert_close, poisoned
from tests.kernels.triton.references import integer_linear as integer_linear_reference


def weights(bits: int, outputs: int, inputs: int, group: int, *, zero: int = 0, lowest: bool = False) -> IntegerMatrix:
    random = torch.Generator().manual_seed(inputs + bits)
    codes = torch.randint(1 << bits, (outputs, inputs), generator=random, dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // group, generator=random) * 2.0**-bits
    minima = -torch.rand(outputs, inputs // group, generator=random) if lowest else None
    matrix = pack(codes, bits, scales, zero, minima)
    moved = None if matrix.minima is None else matrix.minima.to(DEVICE)
    on_device = matrix.codes.to(DEVICE), matrix.scales.to(DEVICE), moved
    return IntegerMatrix(*on_device, matrix.per_word, matrix.zero, matrix.counters.to(DEVICE))


def multiply(rows: int, matrix: IntegerMatrix, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, matrix.inputs, generator=random).to(DEVICE, dtype)
    out = poisoned(x.new_empty(rows, matrix.outputs))
    integer_linear.integer_linear(x, matrix, bias, out)
    assert_close(out, integer_linear_reference.reference(x, matrix, bias), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "matrix",
    [
        weights(4, 70, 256, 64, zero=8),
        weights(4, 70, 96, 32, lowest=True),
        weights(8, 40, 160, 160, zero=128),
        weights(5, 40, 96, 16, zero=16),
        weights(4, 40, 192, 16, zero=8),
    ],
    ids=["int4", "int4 minima", "int8 per output", "groups of 16", "int4 in groups of 16"],
)
def test_products_equal_the_reference(matrix: IntegerMatrix, dtype: torch.dtype) -> None:
    multiply(3, matrix, None, dtype)
    multiply(19, matrix, torch.arange(matrix.outputs, device=DEVICE, dtype=dtype), dtype)


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 65])
def test_any_number_of_rows_equals_the_reference(rows: int) -> None:
    multiply(rows, weights(4, 33, 64, 64, zero=8), None, torch.bfloat16)


@pytest.mark.parametrize("matrix", [weights(4, 70, 2048, 128, zero=8), weights(8, 40, 1024, 1024, zero=100)], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_products_of_programs_that_share_inputs_equal_the_reference(matrix: IntegerMatrix, rows: int) -> None:
    assert splits_of(rows, 16 if rows <= 16 else 64, matrix.outputs, len(matrix.codes)) > 1
    for _ in range(2):
        multiply(rows, matrix, torch.arange(matrix.outputs, device=DEVICE, dtype=torch.bfloat16), torch.bfloat16)
        assert not matrix.counters.any(), "the next product counts from 0"


def test_codes_of_four_bits_share_bytes() -> None:
    assert weights(4, 8, 64, 32).codes.nbytes == 8 * 32
    assert weights(5, 8, 64, 32).codes.nbytes == 8 * 64


def test_groups_that_the_kernel_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 24"):
        weights(4, 8, 48, 24)
