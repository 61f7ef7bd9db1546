import pytest

from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.shared.messages.work import Sampling


def beams(width: int, max_tokens: int, candidates: int = 0) -> Sampling:
    return Sampling(max_tokens, beam_width=width, candidates=candidates or width)


def test_slots_leave_a_block_of_the_budget_for_prompts() -> None:
    assert TermLimits(64, 16, 256, 64, 1).max_running == 48
    assert TermLimits(64, 16, 8, 64, 1).max_running == 8
    assert TermLimits(64, 16, 256, 16, 1).max_running == 8
    assert TermLimits(64, 16, 256, 1, 1).max_running == 1


@pytest.mark.parametrize(("positions", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_a_block_that_has_begun_counts(positions: int, blocks: int) -> None:
    assert TermLimits(64, 16, 8, 64, 1).entries_for(positions) == blocks


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(10, 7, True), (10, 8, False), (16, 1, True), (17, 1, False)]
)
def test_a_sequence_fits_if_the_pool_holds_it_to_its_last_token(prompt: int, max_tokens: int, fits: bool) -> None:
    # Nothing is computed for the last token: its position takes no room.
    sequence = Sequence(1, [1] * prompt, prompt, Sampling(max_tokens))
    assert TermLimits(4, 4, 8, 64, 1).fits(sequence) is fits


@pytest.mark.parametrize(
    ("width", "max_tokens", "reason"),
    [(8, 1, ""), (9, 1, "beam_width must be at most 8"), (8, 32, ""), (8, 34, "KV blocks"), (1, 250, "")],
)
def test_a_search_must_fit_with_all_its_beams(width: int, max_tokens: int, reason: str) -> None:
    error = TermLimits(66, 4, 8, 16, 2, max_candidates=32).beam_search_error(9, beams(width, max_tokens))
    assert reason in error
    assert bool(reason) == bool(error)


def test_a_search_needs_a_device_that_reports_its_candidates() -> None:
    assert "not built for this device" in TermLimits(66, 4, 8, 16, 2).beam_search_error(9, beams(2, 1))
    limits = TermLimits(66, 4, 8, 16, 2, max_candidates=4)
    assert "need 5 candidates, the device reports 4" in limits.beam_search_error(9, beams(2, 1, candidates=5))
