"""Rates of accepted tokens follow what happened, of each sequence and of all."""

import pytest

from pagewire.services.executor.speculation.acceptance import PRIOR, Acceptance


def first_of(acceptance: Acceptance, slot: int, match_length: int = 4) -> float:
    (survival,) = acceptance.survivals(slot, match_length, [1.0])
    return survival


def test_a_new_rate_is_the_prior() -> None:
    acceptance = Acceptance(2)
    survivals = acceptance.survivals(0, 1, [1.0, 1.0, 0.5])
    assert survivals == [PRIOR[0], PRIOR[0] * PRIOR[1], PRIOR[0] * PRIOR[1] * PRIOR[1] * 0.5]


def test_wrong_drafts_lower_the_rate_of_their_sequence_first() -> None:
    acceptance = Acceptance(2)
    for _ in range(6):
        acceptance.observe(0, match_length=4, drafted=3, accepted=0)
    assert first_of(acceptance, 0) < 0.2
    assert 0.2 < first_of(acceptance, 1) < PRIOR[2]


def test_only_tokens_up_to_the_first_wrong_one_count() -> None:
    acceptance = Acceptance(1)
    for _ in range(50):
        acceptance.observe(0, match_length=4, drafted=8, accepted=1)  # of class 2, then a wrong one of class 2
    assert abs(first_of(acceptance, 0) - 0.5) < 0.1
    assert first_of(acceptance, 0, 16) == pytest.approx(PRIOR[4])


def test_a_new_sequence_begins_with_the_rate_of_all() -> None:
    acceptance = Acceptance(1)
    for _ in range(40):
        acceptance.observe(0, match_length=4, drafted=1, accepted=0)
    acceptance.begin(0)
    assert 0.05 < first_of(acceptance, 0) < 0.2


def test_a_rate_that_nothing_tests_returns_to_the_prior() -> None:
    acceptance = Acceptance(1)
    for _ in range(40):
        acceptance.observe(0, match_length=4, drafted=1, accepted=0)
    for _ in range(3000):
        acceptance.fade(0, match_length=4)
    assert abs(first_of(acceptance, 0) - PRIOR[2]) < 0.01
