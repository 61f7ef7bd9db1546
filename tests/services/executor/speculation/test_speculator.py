"""A speculator drafts where a draft is likely to pay, and nowhere else."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pagewire.services.executor.devices.protocol import Float64
from pagewire.services.executor.speculation.drafter import Draft, Drafter, DraftRow, NewSequence
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.shared.sampling_parameters import record
from tests.services.executor.fakes import DRAFTING

DRAFT = Draft([7, 8, 9, 10, 11, 12], [1.0] * 6, 20)


class Constant(Drafter):
    """Drafts the same for every text."""

    def __init__(self, draft: Draft = DRAFT) -> None:
        self._draft = draft

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        tokens, shares, length = self._draft
        return [Draft(tokens[: row.room], shares[: row.room], length) for row in rows]


def speculator(seconds: dict[int, float], draft: Draft = DRAFT, slots: int = 40) -> Speculator:
    """One that has seen steps of these lengths."""
    result = Speculator(Constant(draft), 4, replace(DRAFTING, max_num_seqs=slots))
    for positions, time in seconds.items():
        result.cost.observe(positions, time)
    for slot in range(slots):
        result.begin(slot, NewSequence(record(), known_tokens=1), [11], None)
    return result


def rows(count: int, room: int = 9) -> list[DraftRow]:
    return [DraftRow(slot, np.array([1, 2, 3]), room) for slot in range(count)]


FLAT = {1: 0.010, 8: 0.011, 64: 0.012}
STEEP = {1: 0.010, 2: 0.020, 64: 0.640}


def drafted(drafting: Speculator, *, in_flight: bool = False) -> list[int]:
    """Returns how many tokens are drafted for the first two slots."""
    slots = np.arange(2)
    tokens = np.full((2, 9), 1)
    drafts = drafting.draft_rows(slots, slots * 0 + 3, slots * 0 + 9, tokens, 2, in_flight=in_flight)
    return [len(draft) for draft in drafts]


def test_where_positions_are_free_a_row_has_as_many_drafts_as_it_may() -> None:
    assert speculator(FLAT).draft(rows(2), 2, 2) == [[7, 8, 9, 10]] * 2
    assert speculator(FLAT).draft(rows(1, room=2), 1, 1) == [[7, 8]]


def test_a_draft_ends_before_a_stop_id() -> None:
    assert speculator(FLAT, Draft([7, 11, 8], [1.0] * 3, 20)).draft(rows(1), 1, 1) == [[7]]


def test_where_positions_cost_as_much_as_tokens_nothing_is_drafted() -> None:
    steep = speculator(STEEP)
    assert not steep.pays(1, 1)
    assert not steep.pays(32, 32)
    assert speculator(FLAT).pays(24, 24)
    assert not speculator(FLAT).pays(25, 25), "a full step has no free positions, whatever was measured"


def test_a_drafter_that_is_always_wrong_soon_drafts_nothing() -> None:
    wrong = speculator(FLAT)
    drafted = 0
    for _ in range(300):
        (tokens,) = wrong.draft(rows(1), 1, 1)
        if tokens:
            drafted += 1
            wrong.observe(0, len(tokens), 0)
    assert 0 < drafted < 30
    assert (wrong.drafts, wrong.accepted) == (drafted, 0)


def test_the_likeliest_drafts_get_the_positions() -> None:
    costly = speculator({2: 0.010, 6: 0.014, 8: 0.030})
    for _ in range(20):
        costly.draft(rows(2), 2, 2)
        costly._match_lengths = {0: 20, 1: 20}
        costly.observe(0, 4, 4)
        costly.observe(1, 4, 0)
    first, second = costly.draft(rows(2), 2, 2)
    assert len(first) > len(second)


def test_a_slot_without_a_sequence_has_no_drafts() -> None:
    ended = speculator(FLAT)
    ended.end(0, np.array([1]))
    assert drafted(ended) == [0, 4]


class Costly(Constant):
    """Takes so many seconds for each token, whatever the number of rows."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.limits: list[int] = []

    def seconds(self, rows: int, most: int) -> Float64:
        return np.arange(most + 1.0) * self._seconds

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.limits.append(max(row.room for row in rows))
        return super().draft(rows)


def beside(drafter: Drafter) -> Speculator:
    """Returns a speculator with two sequences whose steps cost as `FLAT` says."""
    result = Speculator(drafter, 4, DRAFTING)
    for positions, time in FLAT.items():
        result.cost.observe(positions, time)
    for slot in range(2):
        result.begin(slot, NewSequence(record(), known_tokens=1), [], None)
    return result


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 4), (0.001, 4), (0.0075, 1), (0.02, 0)])
def test_no_more_is_drafted_than_the_time_of_drafting_pays_for(seconds: float, most: int) -> None:
    drafter = Costly(seconds)
    (tokens,) = beside(drafter).draft(rows(1), 1, 1)
    assert len(tokens) == most
    assert drafter.limits == [most] * (most > 0), "what does not pay is not even asked for"


@pytest.mark.parametrize(("seconds", "likely"), [(0.001, True), (0.02, False)])
def test_while_tokens_are_in_flight_a_drafter_that_takes_time_is_not_asked(seconds: float, likely: bool) -> None:
    drafter = Costly(seconds)
    assert any(drafted(beside(drafter), in_flight=True)) == likely
    assert not drafter.limits
    assert any(drafted(beside(drafter))) == likely


def test_texts_at_the_greatest_length_of_a_drafter_are_not_waited_for() -> None:
    drafter = Costly(0.001)
    drafter.max_length = 3
    assert drafted(beside(drafter), in_flight=True) == drafted(beside(drafter)) == [0, 0]
    drafter.max_length = 5
    assert drafted(beside(drafter)) == [2, 2]


def test_a_step_has_no_more_drafts_than_its_device_verifies() -> None:
    for drafts, positions, number in ((5, 0, 5), (0, 5, 3), (0, 2, 0)):
        capacity = replace(DRAFTING, max_step_drafts=drafts, max_drafted_step=positions)
        limited = Speculator(Constant(), 4, capacity)
        for size, time in FLAT.items():
            limited.cost.observe(size, time)
        for slot in range(2):
            limited.begin(slot, NewSequence(record(), known_tokens=1), [], None)
        assert sum(drafted(limited)) == number


def test_a_device_waits_only_for_drafts_that_pay_for_the_wait() -> None:
    for ahead in (False, True):
        fast = Speculator(Constant(Draft([7] * 4, [0.3] * 4, 20)), 4, DRAFTING, ahead=ahead)
        for positions, time in ((1, 0.001), (200, 0.001)):
            fast.cost.observe(positions, time)
        fast.begin(0, NewSequence(record(), known_tokens=1), [], None)
        assert bool(fast.draft(rows(1), 1, 1)[0]) == (not ahead)
