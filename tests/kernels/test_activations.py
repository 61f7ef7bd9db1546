"""SiLU-and-multiply, GELU in its four forms, and the embedding's gather."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels import embedding, gelu, silu_mul
from tests.kernels.batches import DEVICE, assert_close, int32, poisoned

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(rows: int, size: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * scale).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = values(3, 2 * 1100, dtype)
    out = poisoned(x[:, :1100].contiguous())
    silu_mul.silu_mul(x, out)
    assert_close(out, silu_mul.reference(x), dtype)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu(dtype: torch.dtype, tanh: bool, gated: bool) -> None:
    x = values(2, 1200 if gated else 600, dtype)
    out = poisoned(x[:, :600].contiguous())
    gelu.gelu(x, out, tanh=tanh)
    assert_close(out, gelu.reference(x, 600, tanh=tanh), dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's word for the infinity that is meant
@pytest.mark.parametrize("tanh", [False, True])
def test_large_inputs_do_not_overflow(tanh: bool) -> None:
    x = torch.tensor([[-60.0, -20.0, 0.0, 20.0, 60.0]], device=DEVICE)
    out = poisoned(x)
    gelu.gelu(x, out, tanh=tanh)
    assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 20.0, 60.0]]), torch.float32)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(dtype: torch.dtype) -> None:
    table = values(11, 1050, dtype)
    ids = int32([0, 10, 3, 3])
    out = torch.full((4, 1050), torch.nan, dtype=dtype, device=DEVICE)
    embedding.embedding(ids, table, out)
    assert torch.equal(out, embedding.reference(ids, table))
