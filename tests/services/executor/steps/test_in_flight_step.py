"""The rows of a launched step, and its columns when it has ended."""

import msgspec
import numpy as np

from pagewire.services.executor.devices.protocol import Logprobs, StepBatch
from pagewire.services.executor.steps.in_flight_step import InFlightStep, OutputColumns
from pagewire.shared.messages import unpack
from pagewire.shared.messages.step import NO_TOKEN, Finish
from pagewire.shared.sampling_parameters import NOT_FINITE

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
    changes=0,
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
    assert STEP.columns(tokens, STEP.finishes(tokens), np.zeros(4, np.bool_)) == OutputColumns()


def test_rows_of_many_tokens_end_behind_the_token_that_ends_them() -> None:
    step = msgspec.structs.replace(STEP, left=np.array([9, 2, 4, 3]))
    tokens = np.array([8, 5, 8, 7, 8, 6, NOT_FINITE])
    counts = np.array([3, 2, 2, 0])
    kept, counts, finishes = step.cut(tokens, counts)
    assert (kept.tolist(), counts.tolist()) == ([8, 5, 7, 8, 6], [2, 2, 1, 0])
    assert finishes.tolist() == [Finish.STOP, Finish.LENGTH, Finish.STOP, Finish.NONE]
    columns = step.cut_columns(kept, counts, finishes)
    assert unpack(columns.token_counts) == [2, 2, 1, 0]
    zeros = np.zeros(4, np.int64)
    reported = Logprobs(np.array([0, 0, 0, 2]), np.array([10, 11, 12, 9]), zeros + 1, zeros, zeros.astype("f4"), zeros)
    (part,) = step.logprob_columns(reported, columns)
    assert unpack(part.tokens) == [30, 10, 1, 30, 11, 1]


def test_a_row_that_is_not_finite_keeps_the_tokens_before() -> None:
    step = msgspec.structs.replace(STEP, left=np.array([9, 9, 9, 9]))
    kept, counts, finishes = step.cut(np.array([8, NOT_FINITE, NOT_FINITE]), np.array([2, 1, 0, 0]))
    assert (kept.tolist(), counts.tolist()) == ([8], [1, 0, 0, 0])
    assert finishes.tolist() == [Finish.NOT_FINITE, Finish.NOT_FINITE, Finish.NONE, Finish.NONE]


def test_forced_tokens_follow_the_sampled_one_of_live_rows() -> None:
    tokens, alive = np.array([8, 7, 5, -1]), np.array([True, False, True, True])
    finishes = STEP.finishes(tokens)
    columns = STEP.forced_columns(tokens, {0: [20, 21], 1: [22], 2: [23]}, finishes, alive)
    assert unpack(columns.sequences) == [30, 32, 33]
    assert (unpack(columns.tokens), unpack(columns.token_counts)) == ([8, 20, 21, 5], [3, 1, 0])
    assert list(columns.finishes) == [Finish.NONE, Finish.LENGTH, Finish.NONE], "nothing follows the last token"
    zeros = np.zeros(3, np.int64)
    rows, positions = np.array([1, 2, 3]), np.array([5, 8, 5])  # of a dead row, a sampled token, and one of a prompt
    (part,) = STEP.logprob_columns(Logprobs(rows, positions, zeros + 1, zeros, zeros.astype("f4"), zeros), columns)
    assert unpack(part.tokens) == [32, 8, 1, 33, 5, 1]
