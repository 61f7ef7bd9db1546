from typing import Any

import pytest

from pagewire.bench._chaos.checks import Seen, SeenChoice, is_repetition, judge
from pagewire.bench._chaos.requests import Request
from pagewire.shared.messages.client import Delta, Logprob

STREAM = Request(0, "nats", "greedy", "Once", {})
CANCELLED = Request(0, "nats", "cancelled", "Once", {}, cancel_after=2)


def seen(text: str, ids: list[int], finish: str | None = "length", **fields: Any) -> Seen:
    return Seen(0.0, choices={0: SeenChoice(text, ids, finish)}, **fields)


WANTED = seen("a b c d", [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (seen("a b c d", [1, 2, 3, 4]), "exact"),
        (seen("a b c", [1, 2, 3]), "lost"),
        (seen("a c d", [1, 3, 4]), "lost"),
        (seen("a b b c d", [1, 2, 2, 3, 4]), "duplicated"),
        (seen("a c b d", [1, 3, 2, 4]), "reordered"),
        (seen("a b c e", [1, 2, 3, 5]), "wrong"),
        (seen("a b c d", [1, 2, 3, 4], "stop"), "wrong"),
        (seen("a b c D", [1, 2, 3, 4]), "wrong"),
        (seen("a b", [1, 2], None, error="Unavailable: no detokenizer is there"), "lost"),
        (seen("a b", [1, 2], None, hung=True), "hung"),
        (seen("a b c d", [1, 2, 3, 4], conflicts=["token 2 came again as token 5"]), "duplicated"),
        (Seen(0.0), "lost"),
    ],
)
def test_a_request_has_one_outcome(found: Seen, outcome: str) -> None:
    verdict = judge(STREAM, WANTED, found)
    assert verdict.outcome == outcome
    assert bool(verdict.reason) == (outcome != "exact")


def delta(text: str = "a", token: int = 1, logprob: float = -1.0) -> Delta:
    return Delta(0, 3, text, [token], logprobs=[{token: Logprob(logprob), 7: Logprob(-0.5)}])


@pytest.mark.parametrize(
    ("again", "same"),
    [
        (delta(), True),
        (delta(logprob=-1.000002), True),
        (delta(logprob=-1.01), False),
        (delta(text="b"), False),
        (delta(token=2), False),
        (Delta(0, 3, "a", [1]), False),
    ],
)
def test_a_repeated_token_may_have_otherwise_rounded_logprobs(again: Delta, same: bool) -> None:
    assert is_repetition(delta(), again) is same


@pytest.mark.parametrize(
    ("found", "outcome"),
    [("a b c d", "exact"), ("a b d", "lost"), ("a b b c d", "duplicated"), ("a c b d", "reordered"), ("e", "wrong")],
)
def test_without_ids_words_are_compared(found: str, outcome: str) -> None:
    assert judge(STREAM, seen("a b c d", []), seen(found, [])).outcome == outcome


def test_a_cancelled_request_has_the_beginning_of_its_answer_and_an_end() -> None:
    assert judge(CANCELLED, WANTED, seen("a b", [1, 2], "cancelled", cancelled=True)).outcome == "exact"
    assert judge(CANCELLED, WANTED, seen("a b c d", [1, 2, 3, 4])).outcome == "exact", "it was faster"
    assert judge(CANCELLED, WANTED, seen("a c", [1, 3], "cancelled", cancelled=True)).outcome == "lost"
    assert judge(CANCELLED, WANTED, seen("a b", [1, 2], "length", cancelled=True)).outcome == "wrong"
    assert judge(CANCELLED, WANTED, seen("a b", [1, 2], "cancelled")).outcome == "lost", "nobody has cancelled it"
    gone = seen("a b", [1, 2], None, cancelled=True, complete=False)
    assert judge(CANCELLED, WANTED, gone).outcome == "exact", "its client did not wait for the end"


def test_the_text_of_a_broken_connection_must_be_right_too() -> None:
    assert judge(STREAM, WANTED, seen("a b c d", [1, 2, 3, 4], broken_off=[{0: SeenChoice("a b")}])).outcome == "exact"
    assert judge(STREAM, WANTED, seen("a b c d", [1, 2, 3, 4], broken_off=[{0: SeenChoice("a c")}])).outcome == "wrong"


def test_a_choice_that_is_missing_is_lost() -> None:
    two = Seen(0.0, choices={0: SeenChoice("a", [1], "length"), 1: SeenChoice("b", [2], "length")})
    assert judge(STREAM, two, seen("a", [1])).outcome == "lost"
    assert judge(STREAM, seen("a", [1]), two).outcome == "wrong"


def test_pauses_are_between_steps() -> None:
    times = Seen(1.0, ended=9.0, progress=[2.0, 5.0])
    assert list(times.pauses()) == [(1.0, 2.0), (2.0, 5.0), (5.0, 9.0)]
