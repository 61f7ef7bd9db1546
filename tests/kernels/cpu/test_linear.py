"""Matrix products with packed weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.operators import DTYPES, Operators


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 14), st.integers(15, 70)),
    inputs=st.integers(1, 130),
    outputs=st.one_of(st.integers(1, 70), st.integers(71, 1500)),
    dtype=st.sampled_from(list(DTYPES)),
    biased=st.booleans(),
)
def test_equals_float64(
    operators: Operators, rows: int, inputs: int, outputs: int, dtype: torch.dtype, biased: bool
) -> None:
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1).to(dtype)
    bias = random(outputs, seed=2).to(dtype) if biased else None
    out = operators.linear(x, operators.pack(weight, bias))
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(
    operators: Operators, many_threads: Operators, dtype: torch.dtype
) -> None:
    x, packed = random(61, 200), operators.pack(random(500, 200, seed=1).to(dtype))
    together = operators.linear(x, packed)
    for count in (1, 2, 5, 12, 13, 30):
        for first in range(0, 61 - count, 7):
            assert torch.equal(operators.linear(x[first : first + count], packed), together[first : first + count])
    assert torch.equal(many_threads.linear(x, packed), together)


def test_weights_in_half_precision_lose_nothing_on_the_way(operators: Operators) -> None:
    weight = random(100, 64).bfloat16()
    x = random(20, 64, seed=1)
    assert torch.equal(operators.linear(x, operators.pack(weight)), operators.linear(x, operators.pack(weight.float())))


def test_rows_may_lie_apart(operators: Operators) -> None:
    x, packed = random(8, 100), operators.pack(random(40, 50))
    assert torch.equal(operators.linear(x[:, :50], packed), operators.linear(x[:, :50].clone(), packed))


def test_packing_copies(operators: Operators) -> None:
    weight, x = random(40, 50), random(1, 50)
    packed = operators.pack(weight)
    before = operators.linear(x, packed)
    weight.fill_(0)
    assert torch.equal(operators.linear(x, packed), before)
