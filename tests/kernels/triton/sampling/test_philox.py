"""The uniform numbers are Philox's, to the bit."""

import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.jit import jit
from pagewire.kernels.triton.sampling.philox import uniform
from tests.kernels.triton.batches import DEVICE, int32
from tests.kernels.triton.references.philox import reference


@jit
def draw(out: tl.tensor, keys: tl.tensor, positions: tl.tensor) -> None:
    index = tl.program_id(0)
    tl.store(out + index, uniform(tl.load(keys + index), tl.load(positions + index)))


def drawn(keys: list[int], positions: list[int]) -> list[float]:
    out = torch.full((len(keys),), torch.nan, dtype=torch.float64, device=DEVICE)
    signed = [key - 2**64 if key >= 2**63 else key for key in keys]
    draw[(len(keys),)](out, torch.tensor(signed, device=DEVICE), int32(positions))
    return [float(value) for value in out]


def test_the_reference_gives_the_known_answers_of_random123() -> None:
    """`philox4x32 10` in the test vectors of the authors' library, for zeros."""
    assert reference(0, 0) == ((0x6627E8D5 >> 8) + 0.5) * 2.0**-24


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_the_kernel_equals_the_reference(key: int, position: int) -> None:
    assert drawn([key], [position]) == [reference(key, position)]


def test_numbers_lie_inside_the_unit_interval_and_differ() -> None:
    values = [reference(2**63 + 11, position) for position in range(2000)]
    assert 0 < min(values) < 0.01
    assert 0.99 < max(values) < 1
    assert len(set(values)) > 1990
