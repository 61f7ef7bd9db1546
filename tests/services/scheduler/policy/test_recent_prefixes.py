from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.scheduler.policy.recent_prefixes import MAX_PREFIXES, RecentPrefixes
from pagewire.shared.messages import pack, unpack
from pagewire.shared.prefix_hashes import SPAN, prefix_hashes


def tokens(first: int, spans: int) -> list[int]:
    return list(range(first, first + spans * SPAN))


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=12))
def test_the_last_prefixes_are_held_as_many_as_fit(room: int, sequences: list[tuple[int, int]]) -> None:
    recent = RecentPrefixes(room * SPAN)
    for first, spans in sequences:
        recent.add(tokens(first, spans))
        held = unpack(recent.packed())
        assert len(held) == len(set(held)) <= room
        expected = prefix_hashes(pack(tokens(first, spans)))[:room]
        assert set(expected) <= set(held), "of one sequence, its beginning is kept"


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    recent = RecentPrefixes(4 * SPAN)
    old, new, newer = tokens(1, 2), tokens(2, 2), tokens(3, 1)
    for sequence in (old, new, old, newer):
        recent.add(sequence)
    held = set(unpack(recent.packed()))
    assert set(prefix_hashes(pack(old))) <= held
    assert prefix_hashes(pack(new))[0] in held
    assert prefix_hashes(pack(new))[1] not in held


def test_a_message_stays_small_and_a_pool_without_a_cache_has_nothing() -> None:
    large, none = RecentPrefixes(1 << 30), RecentPrefixes(0)
    for first in range(100):
        large.add(tokens(1000 * first, 100))
        none.add(tokens(1000 * first, 100))
    assert len(large.packed()) == 4 * MAX_PREFIXES
    assert none.packed() == b""


def test_another_salt_is_another_prefix() -> None:
    recent = RecentPrefixes(9 * SPAN)
    recent.add(tokens(1, 2), "ours")
    assert set(unpack(recent.packed())) == set(prefix_hashes(pack(tokens(1, 2)), "ours"))
