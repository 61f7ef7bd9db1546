from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.messages import pack
from pagewire.shared.prefix_hashes import DEPTH, SPAN, prefix_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=5 * SPAN)


@given(TOKENS, TOKENS)
def test_one_hash_per_span_that_depends_on_all_before_it(common: list[int], rest: list[int]) -> None:
    short, long = prefix_hashes(pack(common)), prefix_hashes(pack(common + rest))
    assert len(long) == len(common + rest) // SPAN
    assert long[: len(short)] == short
    assert all(0 <= number < 2**32 for number in long)


def test_another_first_token_changes_all_hashes() -> None:
    one, other = (prefix_hashes(pack([first, *range(4 * SPAN)])) for first in (1, 2))
    assert not set(one) & set(other)


def test_another_salt_changes_all_hashes() -> None:
    text = pack(range(4 * SPAN))
    plain, one, other = (prefix_hashes(text, salt) for salt in ("", "a", "b"))
    assert plain == prefix_hashes(text)
    assert len({*plain, *one, *other}) == 12


def test_a_very_long_prompt_is_hashed_in_part() -> None:
    assert len(prefix_hashes(pack(range(2 * SPAN * DEPTH)))) == DEPTH
