import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.shared import step_reader
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.step_reader import StepReader


def output(step: int, term: int = 1) -> StepOutput:
    return StepOutput(term, step, 0, b"", b"", b"", b"", b"", 0)


def steps(outputs: list[StepOutput]) -> list[int]:
    return [one.step for one in outputs]


def feed(reader: StepReader, *numbers: int, term: int = 1) -> list[int]:
    return [step for number in numbers for step in steps(reader.feed(output(number, term)))]


def test_steps_in_order_pass() -> None:
    reader = StepReader()
    assert feed(reader, 0, 1, 2) == [0, 1, 2]
    assert (reader.last, reader.missing) == (2, None)


def test_the_first_output_may_be_any() -> None:
    reader = StepReader()
    assert feed(reader, 41, 42) == [41, 42]
    assert feed(reader, 40) == []


def test_a_reader_of_a_term_reads_from_step_0() -> None:
    reader = StepReader(term=1)
    assert feed(reader, 1) == []
    assert reader.missing == (0, 0)
    assert feed(reader, 0) == [0, 1]


def test_outputs_after_a_gap_wait_for_it() -> None:
    reader = StepReader()
    assert feed(reader, 0, 3, 5) == [0]
    assert reader.missing == (1, 2)
    assert feed(reader, 2) == []
    assert reader.missing == (1, 1)
    assert feed(reader, 1) == [1, 2, 3]
    assert reader.missing == (4, 4)
    assert feed(reader, 4) == [4, 5]
    assert not reader.missing


def test_repeated_outputs_are_dropped() -> None:
    reader = StepReader()
    assert feed(reader, 0, 1, 0, 1, 3, 3, 2, 2) == [0, 1, 2, 3]


def test_a_higher_term_begins_anew_at_its_step_0() -> None:
    reader = StepReader()
    feed(reader, 7, 9)
    assert feed(reader, 1, term=2) == []
    assert reader.missing == (0, 0)
    assert feed(reader, 0, term=2) == [0, 1]
    assert feed(reader, 8, 10, 2, term=1) == []


def test_a_heartbeat_shows_that_the_last_output_is_missing() -> None:
    reader = StepReader()
    feed(reader, 0)
    reader.note_run(1, 2)
    assert reader.missing == (1, 2)
    assert feed(reader, 1, 2) == [1, 2]
    reader.note_run(1, 2)
    assert reader.missing is None


def test_a_heartbeat_shows_that_a_terms_first_output_is_missing() -> None:
    reader = StepReader()
    feed(reader, 9)
    reader.note_run(2, -1)
    assert (reader.term, reader.missing) == (2, None)
    reader.note_run(2, 0)
    assert reader.missing == (0, 0)
    reader.note_run(1, 50)
    assert reader.missing == (0, 0)


def test_a_heartbeat_does_not_begin_the_reading() -> None:
    reader = StepReader()
    reader.note_run(1, 30)
    assert reader.missing is None
    assert feed(reader, 31) == [31]


def test_a_gap_without_outputs_is_skipped() -> None:
    reader = StepReader()
    feed(reader, 0, 5, 6, 9)
    assert steps(reader.skip()) == [5, 6]
    assert reader.missing == (7, 8)
    assert feed(reader, 1, 2) == []


def test_missing_last_steps_are_never_skipped() -> None:
    reader = StepReader()
    feed(reader, 0)
    reader.note_run(1, 3)
    assert reader.skip() == []
    assert feed(reader, 1, 2, 3) == [1, 2, 3]


def test_the_buffer_behind_a_gap_is_bounded() -> None:
    reader = StepReader()
    end = step_reader.MAX_BUFFERED + 10
    assert feed(reader, 0, *range(2, end)) == [0]
    assert feed(reader, 1) == list(range(1, step_reader.MAX_BUFFERED + 2))
    assert reader.missing == (step_reader.MAX_BUFFERED + 2, end - 1)


@given(st.integers(1, 30), st.integers(0, 2**32), st.floats(0, 0.7))
@settings(max_examples=200)
def test_each_step_comes_once_and_in_order_over_a_lossy_bus(count: int, seed: int, loss: float) -> None:
    chance = random.Random(seed)
    wire = [step for step in range(count) for _ in range(chance.choice((1, 1, 2))) if chance.random() >= loss]
    wire = sorted(wire, key=lambda step: step + chance.random() * 4)
    reader = StepReader(term=1)
    got = feed(reader, *wire)
    reader.note_run(1, count - 1)
    while reader.missing is not None:
        first, last = reader.missing
        got += feed(reader, chance.randint(first, last))
    assert got == list(range(count))
