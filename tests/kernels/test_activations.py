"""SiLU-and-multiply."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels import silu_mul
from tests.kernels.batches import DEVICE, assert_close, poisoned

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(rows: int, size: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * scale).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = values(3, 2 * 1100, dtype)
    out = poisoned(x[:, :1100].contiguous())
    silu_mul.silu_mul(x, out)
    assert_close(out, silu_mul.reference(x), dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's word for the infinity that is meant
def test_large_inputs_do_not_overflow() -> None:
    x = torch.tensor([[-60.0, -20.0, 0.0, 20.0, 60.0]], device=DEVICE)
    out = poisoned(x)
    gate = torch.cat((x, torch.ones_like(x)), 1)
    silu_mul.silu_mul(gate, out)
    assert_close(out, silu_mul.reference(gate), torch.float32)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(1, 1500))
def test_any_shape(rows: int, size: int) -> None:
    x = values(rows, 2 * size)
    out = poisoned(x[:, :size].contiguous())
    silu_mul.silu_mul(x, out)
    assert_close(out, silu_mul.reference(x), torch.float32)
