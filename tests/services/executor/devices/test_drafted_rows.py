"""The places of a step where rows with drafts sample."""

import msgspec
import numpy as np

from pagewire.services.executor.devices.drafted_rows import DraftedRows
from pagewire.services.executor.devices.protocol import StepBatch

BATCH = StepBatch(
    slots=np.array([4, 5, 6]),
    num_computed_tokens=np.array([10, 0, 20]),
    query_lens=np.array([3, 2, 1]),
    token_ids=np.array([1, 2, 3, 40, 41, 9]),
    samples=np.array([True, False, True]),
    num_drafts=np.array([2, 0, 0]),
)
"""A row with two drafts, a chunk of a prompt, and a row without drafts."""


def test_a_row_samples_behind_its_known_tokens_and_behind_each_draft() -> None:
    drafted = DraftedRows(BATCH)
    assert (drafted.rows.tolist(), drafted.slots.tolist(), drafted.ends.tolist()) == ([0, 2], [4, 6], [11, 21])
    assert (drafted.places.tolist(), drafted.owners.tolist()) == ([0, 1, 2, 5], [0, 0, 0, 1])
    assert drafted.positions.tolist() == [11, 12, 13, 21]
    assert drafted.first.tolist() == [0, 3]


def test_a_row_that_samples_nothing_has_a_place_too() -> None:
    drafted = DraftedRows(BATCH)
    assert drafted.indices.tolist() == [0, 1, 2, 4]
    assert [drafted.drafts(row) for row in range(2)] == [[2, 3], []]
    plain = DraftedRows(msgspec.structs.replace(BATCH, num_drafts=None))
    assert (plain.indices.tolist(), plain.positions.tolist(), plain.places.tolist()) == ([0, 2], [13, 21], [2, 5])


def test_tokens_count_up_to_the_first_that_is_not_drafted() -> None:
    drafted = DraftedRows(BATCH)
    assert drafted.accepted(np.array([2, 3, 7, 8])) == [[2, 3, 7], [8]]
    assert drafted.accepted(np.array([2, 5, 7, 8])) == [[2, 5], [8]]
    assert drafted.accepted(np.array([6, 3, 7, 8])) == [[6], [8]]
    assert drafted.agree(np.array([0, 1]), 0, np.array([2, 9])).tolist() == [0]
    assert drafted.agree(np.array([0]), 1, np.array([4])).tolist() == []
    assert drafted.agree(np.array([0]), 2, np.array([4])).tolist() == []


def test_the_tokens_are_columns_of_all_rows() -> None:
    tokens, counts = DraftedRows(BATCH).columns([[2, 3, 7], [8]])
    assert (tokens.tolist(), counts.tolist()) == ([2, 3, 7, 8], [3, 0, 1])
