"""Rows with drafted tokens: where they may be, and what counts as computed afterwards."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pagewire.services.executor.devices.protocol import Int64
from pagewire.services.executor.speculation.drafter import NewSequence
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.steps.in_flight_step import InFlightStep
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.shared.messages import unpack
from pagewire.shared.messages.plan import AddSlot
from pagewire.shared.messages.step import Finish
from pagewire.shared.sampling_parameters import NOT_FINITE, record
from tests.services.executor.fakes import DRAFTING, add, plan, sampling
from tests.support.drafters import Scripted


def drafting(
    *added: AddSlot, draft: Sequence[int] = (), guess: Callable[[list[int], int], list[int]] | None = None
) -> SlotTable:
    """A table whose rows all get this draft, or the guess for their text, as far as there is room, and whose sequences
    have their first token."""
    speculator = Speculator(Scripted(guess or (lambda _text, _most: [*draft])), 8, DRAFTING)
    speculator.cost.observe(1, 1.0)
    speculator.cost.observe(200, 1.0)  # positions are free
    table = SlotTable(DRAFTING, speculator)
    table.apply(plan(1, *added))
    for each in added:
        speculator.begin(each.slot, NewSequence(record(), each.prompt_tokens), unpack(each.sampling.stop_ids), None)
    return table


class Keeping(Scripted):
    """Drafts nothing, and keeps the texts of the sequences that have ended."""

    def __init__(self) -> None:
        super().__init__(lambda _text, _most: [])
        self.texts: list[list[int]] = []

    def end(self, slot: int, text: Int64) -> None:
        self.texts.append(text.tolist())


def keeping(added: AddSlot) -> tuple[SlotTable, Keeping]:
    """A table in whose only slot another sequence has left tokens."""
    drafter = Keeping()
    speculator = Speculator(drafter, 8, DRAFTING)
    table = SlotTable(DRAFTING, speculator)
    for number, each in enumerate((add(0, 9, range(20, 40), [0, 1, 2, 3, 4, 5, 6]), added)):
        table.apply(plan(1 + number, each, removed=[0] if number else ()))
        speculator.begin(0, NewSequence(record(), each.prompt_tokens), unpack(each.sampling.stop_ids), None)
    drafter.texts.clear()
    return table, drafter


def launched(table: SlotTable) -> InFlightStep:
    step = table.launch()
    assert step is not None
    return step


def drafts(step: InFlightStep) -> list[int]:
    return [] if step.batch.num_drafts is None else step.batch.num_drafts.tolist()


def test_drafts_stand_behind_the_known_tokens_and_right_ones_count_as_computed() -> None:
    table = drafting(add(0, 1, [3], [0, 1, 2]), draft=[7, 8, 9])
    step = launched(table)
    assert (step.batch.token_ids.tolist(), drafts(step), step.batch.ends.tolist()) == ([3, 7, 8, 9], [3], [1])
    columns = table.record(step, np.array([7, 8, 30]), np.array([3]))
    assert (unpack(columns.starts), unpack(columns.counts), unpack(columns.tokens)) == ([0], [1], [7, 8, 30])
    assert unpack(columns.drafts) == [1, 3, 2]
    following = launched(table).batch
    assert (following.num_computed_tokens.tolist(), following.token_ids[0]) == ([3], 30)


def test_a_wrong_draft_leaves_one_token_and_its_positions_are_computed_again() -> None:
    table = drafting(add(0, 1, [3], [0, 1, 2]), draft=[7, 8])
    table.record(launched(table), np.array([30]), np.array([1]))
    following = launched(table).batch
    assert (following.num_computed_tokens.tolist(), following.token_ids[:2].tolist()) == ([1], [30, 7])


@pytest.mark.parametrize(("blocks", "most"), [([0], 3), ([0, 1], 7)])
def test_no_draft_is_written_beyond_the_limit(blocks: list[int], most: int) -> None:
    assert drafts(launched(drafting(add(0, 1, [3], blocks), draft=[7] * 8))) == [most]


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, []), (2, [1]), (4, [3])])
def test_a_row_has_fewer_drafts_than_tokens_are_left(max_tokens: int, expected: list[int]) -> None:
    added = add(0, 1, [3], [0, 1, 2], picks=sampling(1, max_tokens=max_tokens))
    assert drafts(launched(drafting(added, draft=[7] * 8))) == expected


def test_a_sequence_ends_at_its_stop_id_among_right_drafts() -> None:
    added = add(0, 1, [3], [0, 1, 2], picks=sampling(1, max_tokens=20, stop_ids=[8]))
    table = drafting(added, draft=[7, 9])
    columns = table.record(launched(table), np.array([7, 8]), np.array([2]))
    assert (unpack(columns.tokens), list(columns.finishes)) == ([7, 8], [Finish.STOP])
    assert not table.has_work


def test_a_prompt_in_progress_has_no_drafts() -> None:
    table = drafting(add(0, 1, range(9), [0, 1, 2, 3]), draft=[7])
    table.apply(plan(2, budget=4))
    for _ in range(2):
        step = launched(table)
        assert drafts(step) == []
        table.record(step, np.array([-1]))
    step = launched(table)
    assert (step.batch.token_ids.tolist(), drafts(step)) == ([8, 7], [1])


def test_no_step_is_launched_beside_a_step_with_drafts() -> None:
    table = drafting(add(0, 1, [3], [0, 1, 2]), add(1, 2, range(5), [3, 4, 5]), draft=[7])
    table.apply(plan(2, budget=2))
    step = launched(table)
    assert drafts(step) == [1, 0]
    assert table.launch() is None, "the prompt could go on"
    table.record(step, np.array([30]), np.array([1, 0]))
    assert table.launch() is not None


def test_a_step_waits_for_tokens_in_flight_where_drafts_are_likely() -> None:
    """Drafts are found by the text without those tokens, and follow the text with them."""
    begins: dict[int, list[int]] = {1: [], 3: [9, 9], 4: [9, 9]}
    table = drafting(add(0, 1, [3], [0, 1, 2]), guess=lambda text, _most: begins.get(len(text), []))
    first = launched(table)
    second = launched(table)
    assert (drafts(first), drafts(second)) == ([], []), "nothing is likely: both are in flight"
    table.record(first, np.array([30]))
    table.record(second, np.array([31]))
    third = launched(table)
    assert (third.batch.token_ids.tolist(), drafts(third)) == ([31, 9, 9], [2])
    table.record(third, np.array([40]), np.array([1]))
    fourth = launched(table)
    assert (fourth.batch.token_ids.tolist(), drafts(fourth)) == ([40, 9, 9], [2])
    table.record(fourth, np.array([9, 41]), np.array([2]))
    begins |= {7: [9]}
    fifth = launched(table)
    assert drafts(fifth) == []
    begins |= {6: [9]}
    assert table.launch() is None, "the text without the token in flight goes on"
    table.record(fifth, np.array([42]))
    assert drafts(launched(table)) == [1]


def test_forced_tokens_that_agree_with_drafts_are_computed() -> None:
    table = drafting(add(0, 1, [3], [0, 1, 2]), draft=[7, 8, 9])
    columns = table.record(launched(table), np.array([7, 8, 20, 21]), np.array([4]))
    assert unpack(columns.tokens) == [7, 8, 20, 21]
    following = launched(table).batch
    assert (following.num_computed_tokens.tolist(), following.token_ids[:2].tolist()) == ([3], [20, 21])


def test_what_steps_in_flight_sample_is_no_text_of_a_sequence_that_is_removed() -> None:
    table, drafter = keeping(add(0, 1, [3], [0, 1, 2]))
    table.record(launched(table), np.array([7]))
    launched(table), launched(table)
    table.apply(plan(3, removed=[0]))
    assert drafter.texts == [[3, 7]]


def test_neither_is_what_a_grammar_forces_behind_it() -> None:
    table, drafter = keeping(add(0, 1, [3], [0, 1, 2]))
    table.append_forced(launched(table), {0: [8, 9]})
    table.apply(plan(3, removed=[0]))
    assert not {*range(20, 40)}.intersection(*drafter.texts), "a token of the slot's earlier sequence"


def test_a_token_that_could_not_be_sampled_is_no_text() -> None:
    table, drafter = keeping(add(0, 1, [3], [0, 1, 2]))
    table.record(launched(table), np.array([7]))
    table.record(launched(table), np.array([NOT_FINITE]))
    table.apply(plan(3, removed=[0]))
    assert drafter.texts == [[3, 7]]


def test_a_text_ends_at_its_stop_id_although_another_step_was_launched() -> None:
    table, drafter = keeping(add(0, 1, [3], [0, 1, 2], picks=sampling(1, max_tokens=20, stop_ids=[8])))
    first, dead = launched(table), launched(table)
    table.record(first, np.array([8]))
    table.record(dead, np.array([55]))
    table.apply(plan(3, removed=[0]))
    assert drafter.texts == [[3, 8]]


def test_drafts_are_counted_by_the_step_also_where_the_slot_has_another_sequence() -> None:
    table = drafting(add(0, 1, [3], [0, 1, 2]), draft=[7, 8, 9])
    step = launched(table)
    table.apply(plan(2, add(0, 2, [4, 40, 41, 42], [3, 4, 5]), removed=[0]))
    columns = table.record(step, np.array([7, 8, 30]), np.array([3]))
    assert unpack(columns.drafts) == [1, 3, 2]
