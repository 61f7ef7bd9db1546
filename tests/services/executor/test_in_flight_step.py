"""What becomes of a launched step's rows."""

import numpy as np

from pagewire.services.executor.devices.protocol import StepBatch
from pagewire.services.executor.in_flight_step import Columns, InFlightStep
from pagewire.shared.messages import unpack
from pagewire.shared.messages.step import NO_TOKEN, Finish
from pagewire.shared.sampling import NOT_FINITE

STEP = InFlightStep(
    batch=StepBatch(
        slots=np.array([3, 0, 2, 1]),
        num_computed_tokens=np.array([9, 4, 7, 0]),
        query_lens=np.array([1, 1, 1, 5]),
        token_ids=np.zeros(8, np.int64),
        samples=np.array([True, True, True, False]),
    ),
    sequences=np.array([30, 31, 32, 33]),
    admissions=np.array([1, 2, 3, 4]),
    stop_ids=np.array([[5, -1], [6, 5], [6, -1], [6, -1]]),
    full=np.array([False, True, True, False]),
)


def test_a_stop_id_wins_over_the_length_and_fill_is_no_stop_id() -> None:
    expected = [Finish.NONE, Finish.STOP, Finish.LENGTH, Finish.NONE]
    assert STEP.finishes(np.array([8, 5, 5, -1])).tolist() == expected


def test_a_row_without_a_token_fails_also_at_its_full_length() -> None:
    tokens = np.array([NOT_FINITE, NOT_FINITE, 5, -1])
    finishes = STEP.finishes(tokens)
    assert finishes.tolist() == [Finish.NOT_FINITE, Finish.NOT_FINITE, Finish.LENGTH, Finish.NONE]
    assert unpack(STEP.columns(tokens, finishes, None).tokens) == [NO_TOKEN, NO_TOKEN, 5, NO_TOKEN]


def test_dead_rows_are_left_out() -> None:
    tokens = np.array([8, 5, 5, -1])
    columns = STEP.columns(tokens, STEP.finishes(tokens), np.array([True, False, False, True]))
    assert unpack(columns.sequences) == [30, 33]
    assert unpack(columns.starts) == [9, 0]
    assert unpack(columns.counts) == [1, 5]
    assert unpack(columns.tokens) == [8, NO_TOKEN]
    assert list(columns.finishes) == [Finish.NONE, Finish.NONE]


def test_without_a_row_alive_the_columns_are_empty() -> None:
    tokens = np.array([8, 5, 5, -1])
    assert STEP.columns(tokens, STEP.finishes(tokens), np.zeros(4, np.bool_)) == Columns()
