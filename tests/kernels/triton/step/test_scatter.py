"""Deltas are written where they say, and only as many as the count on the device."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.step.scatter import scatter
from tests.kernels.triton.batches import DEVICE, int32
from tests.kernels.triton.references.scatter import reference


def check(shape: tuple[int, int], updates: list[tuple[int, int, int]], spare: int) -> None:
    table = torch.arange(shape[0] * shape[1], dtype=torch.int32, device=DEVICE).reshape(shape)
    packed = int32([*updates, *[(0, 0, -99)] * spare] or [(0, 0, -99)])
    expected = reference(table, packed, len(updates))
    scatter(table, packed, int32([len(updates)]))
    assert torch.equal(table, expected)


def test_more_updates_than_one_program_takes_are_made() -> None:
    check((20, 40), [(index // 40, index % 40, -index) for index in range(600)], 30)


def test_no_updates_change_no_number() -> None:
    check((2, 3), [], 4)


def test_floats_travel_as_their_bits() -> None:
    table = torch.zeros(2, 2, device=DEVICE)
    bits = int(torch.tensor(0.7).view(torch.int32))
    scatter(table.view(torch.int32), int32([(1, 0, bits)]), int32([1]))
    assert table[1, 0] == torch.tensor(0.7)


@settings(max_examples=10, deadline=None)
@given(st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 6)), st.integers(-(2**31), 2**31 - 1)))
def test_any_updates_equal_the_reference(updates: dict[tuple[int, int], int]) -> None:
    check((5, 7), [(row, column, value) for (row, column), value in updates.items()], 3)
