"""Columns are what the messages' own packing says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.steps.packed_columns import column, packed, pairs
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.step import NO_TOKEN

numbers = st.lists(st.integers(0, 2**32 - 1))


@given(numbers)
def test_a_column_holds_the_packed_numbers(values: list[int]) -> None:
    assert column(pack(values)).tolist() == values
    assert packed(np.array(values, np.int64)) == pack(values)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_packed_pairs_unpack_into_two_columns(values: list[tuple[int, int]]) -> None:
    first, second = pairs(pack([value for pair in values for value in pair]))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == values


def test_no_token_is_minus_one() -> None:
    assert unpack(packed(np.array([-1, 3]))) == [NO_TOKEN, 3]


@pytest.mark.parametrize("data", [b"\x00", b"\x00" * 6])
def test_a_cut_number_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="size"):
        column(data)


def test_a_cut_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="reshape"):
        pairs(pack([1, 2, 3]))
