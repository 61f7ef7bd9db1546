"""Drafters repeat what followed the same tokens earlier in the text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftRow, NewSequence
from pagewire.services.executor.speculation.earlier_outputs import END, EarlierOutputs
from pagewire.services.executor.speculation.text_drafters import (
    NgramDrafter,
    SuffixDrafter,
    longest_match,
)
from pagewire.shared.sampling_parameters import record


def drafted(drafter: Drafter, text: list[int], room: int) -> Draft:
    return drafter.draft([DraftRow(0, array(text), room)])[0]


def array(text: list[int]) -> np.ndarray:
    return np.array(text, np.int64)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8))
def test_the_longest_match_is_the_longest_end_that_occurs_earlier(text: list[int], most: int) -> None:
    places, length = longest_match(array(text)[:-1], array(text), most)
    last = len(text) - 1

    def agreeing(place: int) -> int:
        count = 0
        while count < min(most, place + 1) and text[place - count] == text[last - count]:
            count += 1
        return count

    counts = [agreeing(place) for place in range(last)]
    assert length == max([0, *counts])
    if length:
        assert places == [place for place, count in enumerate(counts) if count == length]
    else:
        assert not places


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 4, [8, 1, 2, 3]),  # the last place wins
        ([1, 2, 3, 9, 4, 5, 3], 4, []),  # only one token agrees
        ([7, 7, 7], 5, [7, 7, 7, 7, 7]),  # a loop goes on
        ([1], 4, []),
    ],
)
def test_an_ngram_repeats_the_tokens_that_followed_it_last(text: list[int], most: int, expected: list[int]) -> None:
    assert drafted(NgramDrafter(shortest=2, longest=3), text, most).tokens == expected


def test_a_suffix_follows_the_most_frequent_token_and_tells_its_share() -> None:
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 4, 1, 2]
    draft = drafted(SuffixDrafter(24, factor=1.0, least_share=0.1), text, 8)
    assert draft == Draft([5, 7], [2 / 3, 1 / 2], match_length=2)


def test_a_suffix_drafts_as_many_tokens_as_most_places_agree_on() -> None:
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 4, 1, 2]
    assert drafted(SuffixDrafter(24, factor=0.5, least_share=0.1), text, 8).tokens == [5]
    assert drafted(SuffixDrafter(24, factor=4.0, least_share=0.5), text, 8).tokens == [5]
    assert drafted(SuffixDrafter(24, factor=4.0, least_share=0.9), text, 8).tokens == []
    assert drafted(SuffixDrafter(24, factor=1.0, least_share=0.1), [1, 2, 3], 8) == NO_DRAFT


def after(outputs: EarlierOutputs, text: list[int], salt: str = "", room: int = 8) -> list[int]:
    """The tokens drafted behind a text that repeats nothing of itself."""
    drafter = SuffixDrafter(24, factor=4.0, least_share=0.1, outputs=outputs)
    drafter.begin(0, NewSequence(record(), len(text), salt))
    return drafted(drafter, text, room).tokens


def test_a_suffix_follows_earlier_outputs_of_the_same_tenant() -> None:
    outputs = EarlierOutputs(10)
    drafter = SuffixDrafter(24, factor=1.0, least_share=0.1, outputs=outputs)
    drafter.begin(3, NewSequence(record(), known_tokens=2, cache_salt="alice~"))
    drafter.end(3, array([1, 2, 5, 6, 7, 8]))
    assert after(outputs, [9, 5, 6], "alice~") == [7, 8]
    assert after(outputs, [1], "alice~") == [], "a prompt is no output"
    for salt in ("", "bob~", "alice~s1", "lora/0f3c~alice~"):
        assert after(outputs, [9, 5, 6], salt) == []


def test_an_output_that_is_interrupted_is_kept_once() -> None:
    outputs = EarlierOutputs(10)
    drafter = SuffixDrafter(24, factor=1.0, least_share=0.1, outputs=outputs)
    for known, text in ((2, [1, 2, 5, 6]), (4, [1, 2, 5, 6, 7, 8])):
        drafter.begin(3, NewSequence(record(), known))
        drafter.end(3, array(text))
    assert outputs.of("").tokens.tolist() == [5, 6, END, 7, 8, END]


def test_the_longer_end_of_a_text_decides_where_a_suffix_is_followed() -> None:
    outputs = EarlierOutputs(10)
    outputs.add("", array([4, 5, 6, 7]))
    assert after(outputs, [5, 1, 4, 5])[:2] == [6, 7]
    assert after(outputs, [4, 5, 1, 4, 5], room=1) == [1], "its own text where both are as long"


def test_drafts_end_with_an_output_and_never_go_on_in_the_next_one() -> None:
    outputs = EarlierOutputs(10)
    for output in ([4, 5], [7, 8, 9], [1, 4, 5]):
        outputs.add("", array(output))
    assert after(outputs, [6, 7, 8]) == [9]
    assert after(outputs, [4, 5]) == [], "nothing has followed"
    assert after(outputs, [5, 7]) == [], "no match reaches over the end of an output"
    assert after(outputs, [6, 7]) == [], "one token is no match"
