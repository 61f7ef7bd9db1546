"""Embeddings, normalisation, rotation and activation against PyTorch, in float64 where they compute."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.activation import Activation
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed import DTYPES, table

sizes = st.integers(1, 70)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, 49), min_size=1, max_size=70), width=sizes, dtype=st.sampled_from([*DTYPES]))
def test_an_embedding_gives_the_rows_of_its_table(
    kernels: CpuKernels, ids: list[int], width: int, dtype: torch.dtype
) -> None:
    rows = random(50, width).to(dtype)
    assert torch.equal(kernels.embed(table(rows), torch.tensor(ids)), rows[ids].float())


@settings(max_examples=40, deadline=None)
@given(rows=sizes, width=st.integers(1, 300))
def test_rms_norm_equals_pytorchs(kernels: CpuKernels, rows: int, width: int) -> None:
    x, weight = random(rows, width) * 3, random(width, seed=1)
    expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    torch.testing.assert_close(kernels.normalize(x, weight, None, 1e-6).double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(rows=sizes, heads=st.integers(1, 5), dim=st.integers(1, 80))
def test_rms_norm_of_heads_that_lie_apart_equals_pytorchs(kernels: CpuKernels, rows: int, heads: int, dim: int) -> None:
    projected, weight = random(rows, heads + 2, dim), random(dim, seed=1)
    x = projected[:, 1 : 1 + heads]
    expected = F.rms_norm(x.double(), (dim,), weight.double(), 1e-5)
    torch.testing.assert_close(kernels.normalize(x, weight, None, 1e-5).double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(rows=sizes, width=st.integers(2, 300), mean=st.sampled_from([0.0, 30.0]))
def test_layer_norm_equals_pytorchs(kernels: CpuKernels, rows: int, width: int, mean: float) -> None:
    x, weight, bias = random(rows, width) * 3 + mean, random(width, seed=1), random(width, seed=2)
    expected = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(kernels.normalize(x, weight, bias, 1e-5).double(), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(rows=sizes, heads=st.integers(1, 5), half=st.integers(1, 40), rest=st.integers(0, 24))
def test_a_rotation_turns_pairs_by_their_angles(
    kernels: CpuKernels, rows: int, heads: int, half: int, rest: int
) -> None:
    rotated = 2 * half
    projected = random(rows, heads + 1, rotated + rest)
    before = projected.clone()
    positions = torch.randint(100, (rows,), generator=torch.Generator().manual_seed(1))
    angles = torch.arange(100)[:, None] * torch.rand(half, generator=torch.Generator().manual_seed(2))
    kernels.rotate(projected[:, :heads], torch.cat((angles.cos(), angles.sin()), 1), positions)
    pairs = torch.complex(before[:, :heads, :half].double(), before[:, :heads, half:rotated].double())
    turned = pairs * torch.polar(torch.ones(rows, 1, half).double(), angles[positions][:, None].double())
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(projected[:, :heads, :rotated].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(projected[:, :heads, rotated:], before[:, :heads, rotated:])
    assert torch.equal(projected[:, heads:], before[:, heads:])


PLAIN: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),  # torch's own makes NaN of infinity
    Activation.GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
}


@pytest.mark.parametrize("kind", Activation)
@settings(max_examples=20, deadline=None)
@given(rows=sizes, width=sizes, scale=st.sampled_from([0.1, 3.0, 60.0]))
def test_activations_equal_pytorchs(kernels: CpuKernels, kind: Activation, rows: int, width: int, scale: float) -> None:
    x = random(rows, 2 * width) * scale
    gate, up = x.double().chunk(2, dim=1)
    activated = PLAIN[kind](gate)
    close = 1e-6 * max(1.0, scale**2)
    torch.testing.assert_close(kernels.activate(x, kind, gated=True).double(), activated * up, rtol=1e-5, atol=close)
    plain = kernels.activate(gate.float(), kind, gated=False)
    torch.testing.assert_close(plain.double(), activated, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38, -1e38, 0.0])
def test_activations_of_extreme_numbers_equal_pytorchs(kernels: CpuKernels, value: float, kind: Activation) -> None:
    activated = kernels.activate(torch.tensor([[value, 1.0, 2.0, 1.0]]), kind, gated=True)
    expected = PLAIN[kind](torch.tensor([[value, 1.0]])) * torch.tensor([[2.0, 1.0]])
    torch.testing.assert_close(activated, expected, equal_nan=True)
