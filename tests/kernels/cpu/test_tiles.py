"""Products in bf16 by AMX, whose tiles are of 16 rows, 32 inputs and 16 outputs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from tests.kernels.cpu.test_linear import random, rounded

REFUSED = """
import ctypes, torch
libc = ctypes.CDLL(None, use_errno=True)
class Stack(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
memory = ctypes.create_string_buffer(1 << 13)
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, len(memory))), None) == 0
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
kernels = CpuKernels(build.load(), 1)
made = kernels.linear(torch.ones(40, 70), kernels.pack(torch.ones(50, 70).bfloat16()))
print(kernels.tiled, bool((made == 70).all()))
"""
"""Has a signal stack that is too small for tiles, so that Linux refuses them."""


@pytest.fixture(autouse=True)
def _needs_tiles(kernels: CpuKernels) -> None:
    if not kernels.tiled:
        pytest.skip("this CPU has no AMX, or Linux does not let this process use it")


@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 600])
@pytest.mark.parametrize("outputs", [1, 16, 31, 33, 100])
def test_errors_stay_below_the_bound_of_float32_sums(kernels: CpuKernels, inputs: int, outputs: int) -> None:
    weight, bias = random(outputs, inputs, seed=1).bfloat16(), random(outputs, seed=2)
    packed = kernels.pack(weight, bias)
    for rows in (1, 15, 16, 17, 31, 32, 33, 64, 70):
        x = rounded(kernels, random(rows, inputs), weight.dtype).double()
        product = kernels.linear(x.float(), packed).double()
        exact = x @ weight.double().T + bias.double()
        magnitude = x.abs() @ weight.double().abs().T + bias.double().abs()
        assert ((product - exact).abs() <= (inputs + 1) * 2**-24 * magnitude).all()


def test_a_row_is_the_same_in_tiles_of_any_number_of_rows(kernels: CpuKernels, many_threads: CpuKernels) -> None:
    x, packed = random(70, 333), kernels.pack(random(900, 333, seed=1).bfloat16(), random(900, seed=2))
    together = kernels.linear(x, packed)
    for these in (kernels, many_threads):
        for count in range(1, 71):
            assert torch.equal(these.linear(x[70 - count :], packed), together[70 - count :])
            assert these.linear_argmax(x[:count], packed).tolist() == together[:count].argmax(1).tolist()


def test_numbers_that_are_not_finite_stay_in_their_row(kernels: CpuKernels) -> None:
    x, packed = random(20, 50), kernels.pack(random(40, 50, seed=1).bfloat16())
    expected = kernels.linear(x, packed)
    x[3, 7], x[11, 49] = float("nan"), float("inf")
    product = kernels.linear(x, packed)
    assert not product[[3, 11]].isfinite().any()
    others = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(product[others], expected[others])


def test_pairs_are_multiplied_where_tiles_are_not_permitted() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", REFUSED],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(build.__file__).parents[2],
        check=True,
    )
    assert ran.stdout.split() == ["False", "True"]
