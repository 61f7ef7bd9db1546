"""Activations of gates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.activation import Activation
from pagewire.kernels.triton.layers import gated
from tests.kernels.triton.batches import DEVICE, assert_close, poisoned
from tests.kernels.triton.references import gated as gated_reference

OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
"""NumPy's word for the infinity that is meant."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(rows: int, size: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * scale).to(DEVICE, dtype)


@OVERFLOWS
@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gated_activation_equals_the_reference(dtype: torch.dtype, kind: Activation) -> None:
    x = values(3, 2 * 1100, dtype)
    out = poisoned(x[:, :1100].contiguous())
    gated.gated(x, out, kind)
    assert_close(out, gated_reference.reference(x, kind), dtype)


@OVERFLOWS
@pytest.mark.parametrize("kind", Activation)
def test_large_inputs_do_not_overflow(kind: Activation) -> None:
    x = torch.tensor([[-60.0, -20.0, 0.0, 20.0, 60.0]], device=DEVICE)
    out = poisoned(x)
    gate = torch.cat((x, torch.ones_like(x)), 1)
    gated.gated(gate, out, kind)
    assert_close(out, gated_reference.reference(gate, kind), torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", Activation)
def test_a_value_that_is_no_number_stays_none(kind: Activation) -> None:
    gate = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]], device=DEVICE)
    out = torch.zeros(1, 2, device=DEVICE)
    gated.gated(gate, out, kind)
    assert out.isnan().all()


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(1, 1500))
def test_any_shape_equals_the_reference(rows: int, size: int) -> None:
    x = values(rows, 2 * size)
    out = poisoned(x[:, :size].contiguous())
    gated.gated(x, out, Activation.SILU)
    assert_close(out, gated_reference.reference(x, Activation.SILU), torch.float32)


def test_rows_that_do_not_count_are_neither_read_nor_written() -> None:
    """The interpreter would warn of an exponent of NaN or infinity."""
    x = values(4, 2 * 30)
    x[[0, 2]] = torch.finfo(torch.float32).min
    out = torch.full((4, 30), 7.0, device=DEVICE)
    rows = torch.tensor([3, -1, 1, -1], dtype=torch.int32, device=DEVICE)
    gated.gated(x, out, Activation.SILU, rows)
    assert_close(out[[1, 3]], gated_reference.reference(x[[1, 3]], Activation.SILU), torch.float32)
    assert (out[[0, 2]] == 7.0).all()
