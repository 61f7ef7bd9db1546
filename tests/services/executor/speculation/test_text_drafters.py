"""Drafters repeat what followed the same tokens earlier in the text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.speculation.drafter import NO_DRAFT, Draft
from pagewire.services.executor.speculation.text_drafters import (
    NgramDrafter,
    SuffixDrafter,
    longest_match,
)


def array(text: list[int]) -> np.ndarray:
    return np.array(text, np.int64)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8))
def test_the_longest_match_is_the_longest_end_that_occurs_earlier(text: list[int], most: int) -> None:
    places, length = longest_match(array(text), most)
    last = len(text) - 1

    def agreeing(place: int) -> int:
        count = 0
        while count < min(most, place + 1) and text[place - count] == text[last - count]:
            count += 1
        return count

    counts = [agreeing(place) for place in range(last)]
    assert length == max([0, *counts])
    if length:
        assert places.tolist() == [place for place, count in enumerate(counts) if count == length]
    else:
        assert not len(places)


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 4, [8, 1, 2, 3]),  # the last place wins
        ([1, 2, 3, 9, 4, 5, 3], 4, []),  # only one token agrees
        ([7, 7, 7], 5, [7, 7, 7, 7, 7]),  # a loop goes on
        ([1], 4, []),
    ],
)
def test_an_ngram_repeats_what_followed_last(text: list[int], most: int, expected: list[int]) -> None:
    assert NgramDrafter(shortest=2, longest=3).continued(array(text), most).tokens == expected


def test_a_suffix_follows_the_most_frequent_token_and_says_how_frequent_it_was() -> None:
    text = array([1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 4, 1, 2])
    draft = SuffixDrafter(depth=24, factor=1.0, least_share=0.1).continued(text, 8)
    assert draft == Draft([5, 7], [2 / 3, 1 / 2], match_length=2)


def test_a_suffix_drafts_as_many_tokens_as_agree_and_stops_where_few_places_agree() -> None:
    text = array([1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 4, 1, 2])
    assert SuffixDrafter(depth=24, factor=0.5, least_share=0.1).continued(text, 8).tokens == [5]
    assert SuffixDrafter(depth=24, factor=4.0, least_share=0.5).continued(text, 8).tokens == [5]
    assert SuffixDrafter(depth=24, factor=4.0, least_share=0.9).continued(text, 8).tokens == []
    assert SuffixDrafter(depth=24, factor=1.0, least_share=0.1).continued(array([1, 2, 3]), 8) == NO_DRAFT
