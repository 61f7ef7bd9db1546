"""The reference of the random numbers gives the published words, and numbers that are uniform."""

import math

import numpy as np
import pytest

from tests.support.exact_sampling import LAST_POSITION
from tests.support.philox import philox4x32, uniforms

# The known answers of philox4x32-10 that Random123 is published with (kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_words_equal_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    counters = np.array([counter], np.uint64).T
    keys = np.array([key[0] | key[1] << 32], np.uint64)
    assert tuple(philox4x32(counters, keys)[:, 0].tolist()) == words


def test_many_numbers_at_once_equal_single_ones() -> None:
    counters = np.array([counter for counter, _, _ in KNOWN], np.uint64).T
    keys = np.array([key[0] | key[1] << 32 for _, key, _ in KNOWN], np.uint64)
    expected = np.array([words for _, _, words in KNOWN], np.uint64).T
    np.testing.assert_array_equal(philox4x32(counters, keys), expected)


def test_numbers_are_uniform_and_differ_by_key_and_position() -> None:
    key = 0xD0734750FDE362B3
    numbers = uniforms(np.full(50_000, key, np.uint64), np.arange(50_000))
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 49 + 4 * math.sqrt(2 * 49)
    other = uniforms(np.full(50_000, key + 1, np.uint64), np.arange(50_000))
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.02


def test_the_largest_number_is_below_one() -> None:
    assert uniforms(np.array([0], np.uint64), np.array([LAST_POSITION])) == [1 - 2**-25]
