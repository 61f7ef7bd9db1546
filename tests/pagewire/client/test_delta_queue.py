from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.client.delta_queue import DeltaQueue
from pagewire.shared.messages.client import Delta, TokenOrigin


def delta(index: int, start: int) -> Delta:
    return Delta(index, start, chr(ord("a") + start % 26), [start])


def test_a_reader_that_keeps_up_gets_every_delta() -> None:
    queue = DeltaQueue()
    for start in range(3):
        queue.put(delta(0, start))
    assert len(queue) == 3
    assert queue.take() == [delta(0, 0), delta(0, 1), delta(0, 2)]
    assert queue.take() == []


def test_a_reader_that_lags_gets_merged_deltas() -> None:
    queue = DeltaQueue(capacity=2)
    for start in range(5):
        queue.put(delta(0, start))
    first, rest = queue.take()
    assert first == delta(0, 0)
    assert rest == Delta(0, 1, "bcde", [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("origins", "merged"),
    [
        (("drafted", "drafted"), "drafted"),
        (("drafted", "sampled"), msgspec.UNSET),
        (("drafted", msgspec.UNSET), msgspec.UNSET),
        ((msgspec.UNSET, "drafted"), msgspec.UNSET),
        (("drafted", "sampled", "drafted"), msgspec.UNSET),
    ],
)
def test_tokens_that_came_in_different_ways_have_no_origin_together(
    origins: Sequence[TokenOrigin | msgspec.UnsetType], merged: object
) -> None:
    queue = DeltaQueue(capacity=1)
    for start, origin in enumerate(origins):
        queue.put(Delta(0, start, "a", [start], origin=origin))
    assert [delta.origin for delta in queue.take()] == [merged]


def test_a_taken_delta_does_not_change_any_more() -> None:
    queue = DeltaQueue(capacity=1)
    queue.put(delta(0, 0))
    (taken,) = queue.take()
    queue.put(delta(0, 1))
    assert taken == delta(0, 0)
    assert queue.take() == [delta(0, 1)]


@given(st.lists(st.one_of(st.integers(0, 3), st.none()), max_size=200), st.integers(1, 8))
def test_no_token_is_lost_and_the_queue_is_bounded(events: list[int | None], capacity: int) -> None:
    """An integer is an arrival of that choice, None is a visit of the reader."""
    queue = DeltaQueue(capacity)
    sent: dict[int, int] = {}
    read: dict[int, list[int]] = {}
    for event in [*events, None]:
        if event is not None:
            queue.put(delta(event, sent.get(event, 0)))
            sent[event] = sent.get(event, 0) + 1
            assert len(queue) <= capacity + 4
        else:
            for part in queue.take():
                assert part.start == len(read.get(part.index, []))
                read.setdefault(part.index, []).extend(part.token_ids)
    assert {index: list(range(count)) for index, count in sent.items()} == read
