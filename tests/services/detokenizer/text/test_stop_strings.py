from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagewire.services.detokenizer.text.stop_strings import StopStrings

alphabet = st.text("abc", max_size=12)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
pieces_of_text = st.lists(st.text("abc", max_size=4), max_size=10)


@dataclass
class Outcome:
    """Outcome of a stream of pieces: text of each piece, the stop string, and the piece that completed it."""

    texts: list[str]
    stop: str | None = None
    piece: int | None = None


def run(stops: tuple[str, ...], pieces: list[str], *, include: bool = False, min_pieces: int = 0) -> Outcome:
    stream = StopStrings(stops, include=include)
    outcome = Outcome([])
    for index, piece in enumerate(pieces):
        text, outcome.stop = stream.push(piece, armed=index >= min_pieces)
        outcome.texts.append(text)
        if outcome.stop is not None:
            outcome.piece = index
            return outcome
    outcome.texts.append(stream.flush())
    return outcome


def search(stops: tuple[str, ...], pieces: list[str], *, include: bool = False, min_pieces: int = 0) -> Outcome:
    """Reference for `run`, which looks at the whole text character by character."""
    text = "".join(pieces)
    piece_of = [index for index, piece in enumerate(pieces) for _ in piece]
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop) and piece_of[end - 1] >= min_pieces:
                return Outcome([text[: end if include else end - len(stop)]], stop, piece_of[end - 1])
    return Outcome([text])


@given(stop_lists, pieces_of_text, st.booleans(), st.integers(0, 4))
@example(("aab", "ab"), ["a", "a", "ab"], False, 0)
@example(("b", "ab"), ["ab"], False, 0)
@example(("ab", "b"), ["ab"], True, 0)
@example(("abc",), ["ab", "", "ab", "c"], False, 0)
@example(("aa", "aaa"), ["aa", "a", "b"], False, 1)
@settings(max_examples=400)
def test_any_chunks_end_as_a_search_of_the_whole_text(
    stops: tuple[str, ...], pieces: list[str], include: bool, min_pieces: int
) -> None:
    outcome = run(stops, pieces, include=include, min_pieces=min_pieces)
    reference = search(stops, pieces, include=include, min_pieces=min_pieces)
    assert ("".join(outcome.texts), outcome.stop, outcome.piece) == (
        reference.texts[0],
        reference.stop,
        reference.piece,
    )


@given(stop_lists, pieces_of_text)
@settings(max_examples=200)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(stops: tuple[str, ...], pieces: list[str]) -> None:
    stream = StopStrings(stops, include=False)
    seen, sent = "", ""
    for piece in pieces:
        text, stop = stream.push(piece)
        if stop is not None:
            return
        seen, sent = seen + piece, sent + text
        held = seen[len(sent) :]
        beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
        assert held == max((b for b in beginnings if seen.endswith(b)), key=len)


@given(stop_lists, alphabet)
def test_the_way_a_text_is_cut_does_not_matter(stops: tuple[str, ...], text: str) -> None:
    at_once = run(stops, [text])
    by_character = run(stops, list(text))
    assert "".join(at_once.texts) == "".join(by_character.texts)
    assert at_once.stop == by_character.stop


def test_the_first_complete_stop_string_wins_over_the_first_to_begin() -> None:
    assert run(("abcd", "bc"), list("xabcd")).stop == "bc"


def test_the_order_of_the_list_decides_between_two_that_end_together() -> None:
    assert run(("b", "ab"), ["ab"]) == Outcome(["a"], "b", 0)
    assert run(("ab", "b"), ["ab"]) == Outcome([""], "ab", 0)


def test_text_held_back_is_released_when_it_turns_out_harmless() -> None:
    assert run(("stop",), ["st", "o", "re", "s"]) == Outcome(["", "", "store", "", "s"])


def test_a_stop_string_below_the_minimum_is_text_and_may_end_above_it() -> None:
    assert run(("aa",), ["aa", "b", "aa"], min_pieces=2) == Outcome(["a", "ab", ""], "aa", 2)
    assert run(("ab",), ["a", "b"], min_pieces=1) == Outcome(["", ""], "ab", 1)


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one \n\n")])
def test_the_stop_string_stays_if_it_is_wanted(include: bool, text: str) -> None:
    assert run(("\n\n",), ["one ", "\n", "\ntwo"], include=include).texts == ["one ", "", text[4:]]


def test_stop_strings_may_hold_characters_beyond_the_basic_plane() -> None:
    assert run(("🦙🦙",), ["🦙", "x", "🦙", "🦙"]) == Outcome(["", "🦙x", "", ""], "🦙🦙", 3)
