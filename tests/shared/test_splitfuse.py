"""Dynamic SplitFuse, column by column, against the rule written row by row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.splitfuse import PendingTokens, compose, pace_forced

limits = st.integers(-3, 40)
entries = st.lists(st.tuples(st.integers(0, 40), limits), max_size=12) | st.lists(
    st.tuples(st.just(1), limits), max_size=12
)


def rows(work: list[tuple[int, int]], budget: int) -> list[tuple[int, int]]:
    """Slots and query_lens for pairs of remaining and room; slot i is the i-th from the end, so that order shows."""
    table = np.array(work, np.int64).reshape(-1, 2)
    slots, query_lens = compose(PendingTokens(np.arange(len(work))[::-1], table[:, 0], table[:, 1]), budget)
    assert slots.dtype == query_lens.dtype == np.int64
    return list(zip(slots.tolist(), query_lens.tolist(), strict=True))


@given(entries, st.integers(0, 64))
def test_decodes_first_then_prompts_in_order_until_the_budget_is_reached(
    work: list[tuple[int, int]], budget: int
) -> None:
    numbered = [(len(work) - 1 - i, remaining, room) for i, (remaining, room) in enumerate(work)]
    expected = [(slot, 1) for slot, remaining, room in numbered if remaining == 1 and room > 0][:budget]
    left = budget - len(expected)
    for slot, remaining, room in numbered:
        width = min(remaining, room, left)
        if remaining > 1 and width > 0:
            expected.append((slot, width))
            left -= width
    assert rows(work, budget) == expected


@given(entries, st.integers(0, 64))
def test_the_budget_is_filled_exactly_unless_work_runs_out(work: list[tuple[int, int]], budget: int) -> None:
    most = sum(min(remaining, max(room, 0)) for remaining, room in work)
    assert sum(width for _, width in rows(work, budget)) == min(budget, most)


def test_a_long_prompt_is_split_and_short_ones_are_fused() -> None:
    assert rows([(100, 100), (3, 9), (1, 1)], 16) == [(0, 1), (2, 15)]
    assert rows([(5, 9), (3, 9), (100, 100), (1, 1)], 16) == [(0, 1), (3, 5), (2, 3), (1, 7)]


def test_a_slot_at_its_limit_delays_no_other() -> None:
    assert rows([(1, 0), (8, 0), (4, 2), (1, 1)], 16) == [(0, 1), (1, 2)]
    assert rows([(1, -1), (8, -2), (4, 2), (1, 1)], 16) == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("others", "wanted"),
    [(0, [5, 1, 9]), (1, [2, 1, 1]), (23, [2, 1, 1]), (72, [4, 1, 1]), (144, [5, 1, 3]), (2400, [5, 1, 9])],
)
def test_forced_tokens_take_few_positions_of_a_step_with_others(others: int, wanted: list[int]) -> None:
    assert pace_forced(np.array([5, 1, 9]), others).tolist() == wanted
