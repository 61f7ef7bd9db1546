"""Forks in the slot table, and those that it must refuse."""

import msgspec
import numpy as np
import pytest

from pagewire.services.executor.steps.plan_checks import PlanViolation
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.shared.messages import pack
from pagewire.shared.messages.plan import Fork
from pagewire.shared.messages.step import Finish
from tests.services.executor.fakes import add, plan, running, sampling


def fork(
    slot: int, sequence: int, source: int, computed: int, tokens: list[int], blocks: list[int], limit: int
) -> Fork:
    return Fork(slot, sequence, source, computed, pack(tokens), pack(blocks), limit)


def parents() -> SlotTable:
    """Two sequences that have sampled behind five positions and stand at their limits."""
    picks = sampling(max_tokens=4, stop_ids=[9])
    table = running(
        add(0, 1, [1, 2, 3, 4, 5], [0, 1], limit=5, picks=picks), add(1, 2, [11, 12, 13, 14, 15], [2, 3], limit=5)
    )
    step = table.launch()
    assert step is not None
    table.record(step, np.array([7, 8]))
    assert table.launch() is None
    return table


def test_a_fork_begins_where_its_source_stood_and_ends_as_its_source_would() -> None:
    table = parents()
    delta = plan(2, removed=[0, 1])
    delta = msgspec.structs.replace(
        delta,
        forks=(fork(0, 3, 1, 5, [21], [2, 4], 6), fork(1, 4, 0, 5, [22], [0, 1], 6), fork(2, 5, 0, 3, [9, 9], [0], 4)),
    )
    table.apply(delta)
    step = table.launch()
    assert step is not None
    batch = step.batch
    assert step.sequences.tolist() == [3, 4, 5]
    assert batch.num_computed_tokens.tolist() == [5, 5, 3]
    assert batch.query_lens.tolist() == [1, 1, 1]
    assert batch.token_ids.tolist() == [21, 22, 9]
    assert batch.samples.tolist() == [True, True, False]  # the third stands at its limit, one before its last token
    columns = table.record(step, np.array([9, 9, -1]))
    assert list(columns.finishes) == [Finish.NONE, Finish.STOP, Finish.NONE]


def test_a_fork_reads_its_source_before_a_new_sequence_takes_the_slot() -> None:
    table = parents()
    delta = plan(2, add(0, 9, [30, 31], [5]), removed=[0])
    table.apply(msgspec.structs.replace(delta, forks=(fork(2, 3, 0, 4, [40, 41], [0, 6], 8),)))
    step = table.launch()
    assert step is not None
    rows = {int(sequence): i for i, sequence in enumerate(step.sequences)}
    assert set(rows) == {9, 3}
    assert step.batch.token_ids.tolist() == [30, 31, 40, 41]


@pytest.mark.parametrize(
    ("forks", "copies"),
    [
        ([fork(1, 3, 0, 5, [1], [0, 1], 6)], []),  # the slot is in use
        ([fork(2, 3, 3, 5, [1], [0, 1], 6)], []),  # the source is free
        ([fork(2, 3, 99, 5, [1], [0, 1], 6)], []),
        ([fork(2, 3, -1, 5, [1], [0, 1], 6)], []),
        ([fork(4, 3, 0, 5, [1], [0, 1], 6)], []),
        ([fork(2, 3, 0, 6, [1], [0, 1], 7)], []),  # the source has not computed so much
        ([fork(2, 3, 0, -1, [1], [0, 1], 6)], []),
        ([fork(2, 3, 0, 5, [], [0, 1], 5)], []),
        ([fork(2, 3, 0, 5, [50], [0, 1], 6)], []),
        ([fork(2, 3, 0, 5, [1] * 4, [0, 1, 2], 9)], []),  # its end is that of the source
        ([fork(2, 3, 0, 5, [1], [0], 4)], []),
        ([fork(2, 3, 0, 5, [1], [0, 1], 9)], []),
        ([fork(2, 3, 0, 5, [1], [0, 32], 6)], []),
        ([fork(2, 3, 0, 5, [1], [0, 1], 6), fork(2, 4, 0, 5, [1], [0, 1], 6)], []),
        ([], [0, 32]),
        ([], [32, 0]),
        ([], [0, 1, 1, 2]),
        ([], [0, 2, 1, 2]),
    ],
)
def test_forks_and_copies_that_make_no_sense_are_refused(forks: list[Fork], copies: list[int]) -> None:
    table = parents()
    with pytest.raises(PlanViolation):
        table.apply(msgspec.structs.replace(plan(2), forks=tuple(forks), copies=pack(copies)))


def test_a_cut_off_copy_is_refused() -> None:
    with pytest.raises(PlanViolation, match="cut off"):
        parents().apply(msgspec.structs.replace(plan(2), copies=pack([1])))
