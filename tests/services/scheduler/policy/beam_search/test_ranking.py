"""The search alone, against transformers and against its own rules."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.policy.beam_search.ranking import BeamSearch, Candidates, Float32
from pagewire.shared.messages.step import Finish
from tests.support.beam import EOS_ID, beam_cases, reference_logprobs, run_search, transformers_beams
from tests.support.checkpoints import checkpoint

FAMILIES = ["llama", "qwen3", "opt"]


def found(*pairs: tuple[int, float]) -> Candidates:
    return Candidates([token for token, _ in pairs], np.array([value for _, value in pairs], np.float32))


def search(
    width: int = 2, max_tokens: int = 8, length_penalty: float = 1.0, stop_ids: tuple[int, ...] = (0,)
) -> BeamSearch:
    return BeamSearch(width, max_tokens, length_penalty, stop_ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_result_is_that_of_transformers(name: str) -> None:
    ends = set()
    for case in beam_cases(name):
        beams = BeamSearch(case.width, case.max_tokens, case.length_penalty, case.stop_ids)
        logprobs = partial(reference_logprobs, checkpoint(name))
        finished = run_search(beams, case.prompt, case.width + len(case.stop_ids), logprobs)
        assert [hypothesis.tokens for hypothesis in finished[: case.n]] == case.tokens
        ends |= {hypothesis.finish for hypothesis in finished}
    assert ends == {Finish.STOP, Finish.LENGTH}


@pytest.mark.parametrize("width", [1, 2, 7, 16])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("stops", [(), (EOS_ID,), tuple(range(60))], ids=["none", "eos", "many"])
def test_widths_penalties_and_ends_of_text(width: int, penalty: float, stops: tuple[int, ...]) -> None:
    prompt = [5, 300, 41, 7]
    folder = checkpoint("llama")
    beams = BeamSearch(width, 10, penalty, stops)
    finished = run_search(beams, prompt, width + len(stops), partial(reference_logprobs, folder))
    assert len(finished) == width
    if width > 1:  # transformers searches greedily with one beam
        expected = transformers_beams(
            folder, prompt, width=width, n=width, length_penalty=penalty, max_tokens=10, stop_ids=stops
        )
        assert [hypothesis.tokens for hypothesis in finished] == expected


def test_the_prompt_is_one_beam_and_has_the_best_continuations_as_beams() -> None:
    beams = search(width=2)
    assert beams.advance([found((4, -0.5), (7, -1.0), (3, -2.0))]) == [(0, 4), (0, 7)]
    assert [beam.tokens for beam in beams.beams] == [[4], [7]]
    assert [float(beam.score) for beam in beams.beams] == [-0.5, -1.0]


def test_both_next_beams_may_have_the_same_parent() -> None:
    beams = search(width=2)
    beams.advance([found((4, -0.5), (7, -1.0), (3, -2.0))])
    continuations = beams.advance([found((1, -3.0), (2, -3.5), (3, -4.0)), found((5, -0.25), (6, -0.5), (8, -9.0))])
    assert continuations == [(1, 5), (1, 6)]
    assert [beam.tokens for beam in beams.beams] == [[7, 5], [7, 6]]


def test_only_an_end_among_the_best_counts() -> None:
    beams = search(width=2)
    beams.advance([found((4, -0.5), (7, -1.0), (0, -2.0))])  # third best: it is no hypothesis
    assert beams.finished == []
    beams.advance([found((0, -0.1), (2, -3.5), (3, -4.0)), found((5, -0.25), (6, -0.5), (8, -9.0))])
    (hypothesis,) = beams.finished
    assert (hypothesis.tokens, hypothesis.finish) == ([4, 0], Finish.STOP)
    assert hypothesis.score == np.float32(np.float32(-0.6) / np.float32(2))
    assert [beam.tokens for beam in beams.beams] == [[7, 5], [7, 6]]


def test_it_ends_once_the_best_beam_cannot_improve_on_the_finished_ones() -> None:
    beams = search(width=1)
    assert beams.advance([found((0, -0.1), (4, -0.5))]) == []
    assert beams.beams == []
    assert [hypothesis.tokens for hypothesis in beams.finished] == [[0]]


def test_a_penalty_for_the_length_keeps_it_going() -> None:
    """With a large one the present beam looks better than what has ended."""
    beams = search(width=1, length_penalty=5.0)
    beams.advance([found((4, -0.5), (0, -0.6))])
    assert beams.advance([found((0, -0.1), (5, -0.2))]) == []
    assert [hypothesis.tokens for hypothesis in beams.finished] == [[4, 0]]


def test_the_last_token_ends_all_of_them() -> None:
    beams = search(width=2, max_tokens=1)
    assert beams.advance([found((4, -0.5), (0, -1.0), (3, -2.0))]) == []
    ends = [(hypothesis.tokens, hypothesis.finish) for hypothesis in beams.finished]
    assert ends == [([4], Finish.LENGTH), ([0], Finish.STOP)]


def test_ties_go_to_the_earlier_beam_and_the_lower_token() -> None:
    beams = search(width=2)
    assert beams.advance([found((9, -1.0), (4, -1.0), (7, -1.0))]) == [(0, 4), (0, 7)]
    same = found((6, -1.0), (5, -1.0), (8, -2.0))
    assert beams.advance([same, same]) == [(0, 5), (0, 6)]


def test_impossible_tokens_do_no_harm() -> None:
    lowest = float(np.finfo(np.float32).min)
    beams = search(width=2, length_penalty=40.0, max_tokens=3)
    while beams.beams:
        beams.advance([found((4, lowest), (7, lowest), (0, lowest))] * len(beams.beams))
    assert len(beams.finished) == 2


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    width=st.integers(1, 6),
    max_tokens=st.integers(1, 6),
    penalty=st.floats(-3, 3),
    stops=st.integers(0, 4),
)
def test_more_candidates_than_width_and_stops_change_nothing(
    seed: int, width: int, max_tokens: int, penalty: float, stops: int
) -> None:
    """So many are enough: the best that go on are among them, however many end."""

    def logprobs(tokens: list[int]) -> Float32:
        row = np.random.default_rng([seed, *tokens]).normal(size=40).astype(np.float32)
        logprobs: Float32 = (row - np.log(np.exp(row).sum())).astype(np.float32)
        return logprobs

    few, all_ = (
        run_search(BeamSearch(width, max_tokens, penalty, range(stops)), [1], count, logprobs)
        for count in (width + stops, 40)
    )
    assert few == all_
    assert len(few) == width
    assert [h.score for h in few] == sorted((h.score for h in few), reverse=True)
    assert len({tuple(h.tokens) for h in few}) == width
