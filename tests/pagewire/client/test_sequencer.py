from hypothesis import given
from hypothesis import strategies as st

from pagewire.client.sequencer import Sequencer
from pagewire.shared.messages.client import Delta


def delta(index: int, start: int, width: int = 1) -> Delta:
    return Delta(index, start, "x" * width, list(range(width)))


def test_each_token_is_next_once_and_in_order() -> None:
    sequencer = Sequencer(1)
    assert [sequencer.is_next(delta(0, start)) for start in (0, 1, 1, 0, 2)] == [True, True, False, False, True]
    assert sequencer.received == 3


def test_a_delta_before_its_predecessor_is_early() -> None:
    sequencer = Sequencer(1)
    assert not sequencer.is_next(delta(0, 1))
    assert sequencer.is_early(delta(0, 1))
    assert not sequencer.is_early(delta(0, 0))
    assert sequencer.is_next(delta(0, 0))
    assert sequencer.is_next(delta(0, 1))


def test_a_delta_of_several_tokens_advances_by_all_of_them() -> None:
    sequencer = Sequencer(1)
    assert sequencer.is_next(delta(0, 0, width=3))
    assert sequencer.is_next(delta(0, 3))


def test_a_stream_resumes_at_its_slowest_choice() -> None:
    sequencer = Sequencer(3)
    assert sequencer.resume_from == 0
    for index, count in ((0, 4), (1, 2), (2, 3)):
        for start in range(count):
            sequencer.is_next(delta(index, start))
    assert sequencer.resume_from == 2
    assert sequencer.received == 9


@given(
    st.integers(1, 3).flatmap(
        lambda choices: st.lists(st.tuples(st.integers(0, choices - 1), st.integers(0, 6)), max_size=60)
    )
)
def test_each_choice_is_a_gapless_run_whatever_arrives(arrivals: list[tuple[int, int]]) -> None:
    sequencer = Sequencer(3)
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for index, start in arrivals:
        if sequencer.is_next(delta(index, start)):
            taken[index].append(start)
    assert all(starts == list(range(len(starts))) for starts in taken.values())
    assert sequencer.received == sum(map(len, taken.values()))
