"""RMS norm, with and without the residual."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.layers import rms_norm
from tests.kernels.triton.batches import DEVICE, assert_close, poisoned
from tests.kernels.triton.references import rms_norm as rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    shapes = [(rows, size), (rows, size), (size,)]
    return tuple((torch.randn(shape, generator=random) + 0.5).to(DEVICE, dtype) for shape in shapes)


def check_rms(rows: int, size: int, dtype: torch.dtype, *, fused: bool, seed: int = 0) -> None:
    x, residual, weight = inputs(rows, size, dtype, seed)
    given_residual = residual if fused else None
    expected, hidden = rms_norm_reference.reference(x, weight, 1e-5, given_residual)
    out = poisoned(x)
    rms_norm.rms_norm(x, weight, 1e-5, out, given_residual)
    assert_close(out, expected, dtype)
    if fused:
        assert_close(residual, hidden, dtype)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_equal_the_reference(dtype: torch.dtype, fused: bool) -> None:
    check_rms(3, 96, dtype, fused=fused)


def test_a_norm_in_place_equals_the_reference() -> None:
    x, _, weight = inputs(2, 64, torch.float32)
    expected, _ = rms_norm_reference.reference(x, weight, 1e-6)
    rms_norm.rms_norm(x, weight, 1e-6, x)
    assert_close(x, expected, torch.float32)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(1, 300), st.booleans(), st.integers(0, 99))
def test_any_shape_equals_the_reference(rows: int, size: int, fused: bool, seed: int) -> None:
    check_rms(rows, size, torch.float32, fused=fused, seed=seed)
