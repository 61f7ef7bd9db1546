"""The replay buffer holds the last steps of one term."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.outputs.replay_buffer import ReplayBuffer


def name(term: int, step: int) -> bytes:
    return f"{term}.{step}".encode()


@given(
    held=st.integers(1, 8),
    runs=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    first=st.integers(0, 25),
    last=st.integers(0, 25),
)
def test_a_replay_buffer_holds_the_newest_steps_of_the_last_term(
    held: int, runs: list[int], first: int, last: int
) -> None:
    buffer = ReplayBuffer(steps=held)
    term, kept = 0, list[tuple[int, bytes]]()
    for number, count in enumerate(runs, 1):
        for step in range(count):
            buffer.append(number, step, name(number, step))
            if number != term:
                term, kept = number, []
            kept = [*kept, (step, name(number, step))][-held:]
    assert buffer.since(term, first, last) == [data for step, data in kept if first <= step <= last]


@pytest.mark.parametrize("term", [1, 3])
def test_another_term_has_no_steps(term: int) -> None:
    buffer = ReplayBuffer()
    buffer.append(1, 0, b"old")
    buffer.append(2, 0, b"new")
    assert buffer.since(term, 0, 9) == []
    assert buffer.since(2, 0, 9) == [b"new"]


def test_the_bytes_of_a_replay_buffer_are_bounded() -> None:
    buffer = ReplayBuffer(steps=100, size=10)
    for step in range(6):
        buffer.append(1, step, b"four")
    assert buffer.since(1, 0, 9) == [b"four", b"four"]
    buffer.append(1, 6, b"more than ten bytes")
    assert buffer.since(1, 0, 9) == []
    buffer.append(1, 7, b"less")
    assert buffer.since(1, 7, 7) == [b"less"]
    assert buffer.since(1, 0, 6) == []
