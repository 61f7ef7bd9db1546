"""Positions of a step, against the rows' ranges one after the other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.devices.protocol import StepBatch, positions_of

ROWS = st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 40)), min_size=1, max_size=20)


@given(ROWS | st.lists(st.tuples(st.integers(0, 100_000), st.just(1)), min_size=1, max_size=20))
def test_positions_are_the_ranges_of_all_rows_in_order(rows: list[tuple[int, int]]) -> None:
    num_computed_tokens, query_lens = np.array(rows, np.int64).T
    expected = [position for start, width in rows for position in range(start, start + width)]
    assert positions_of(num_computed_tokens, query_lens).tolist() == expected
    ids, every = np.zeros(len(expected), np.int64), np.ones(len(rows), np.bool_)
    batch = StepBatch(np.arange(len(rows)), num_computed_tokens, query_lens, ids, every)
    assert batch.positions.tolist() == expected
    assert batch.ends.tolist() == [start + width for start, width in rows]
