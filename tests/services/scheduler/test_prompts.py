from pagewire.services.scheduler.prompts import NOBODY, PATIENCE, Prompts
from pagewire.services.scheduler.sequence import Sequence
from tests.services.scheduler.cases import sequence


def prompts(*running: Sequence) -> Prompts:
    for slot, one in enumerate(running):
        one.slot = slot
    return Prompts({one.id: one for one in running})


def test_the_shortest_goes_first_and_one_alone_needs_no_order() -> None:
    assert prompts(sequence(30), sequence(10), sequence(20)).order(0) == [1, 2, 0]
    assert prompts(sequence(30)).order(0) == []


def test_what_is_left_counts() -> None:
    assert prompts(sequence(30, computed=25), sequence(10)).order(0) == [0, 1]


def test_one_that_was_passed_for_too_long_goes_first() -> None:
    made = prompts(sequence(30), sequence(10, served=PATIENCE), sequence(5, priority=-1, served=PATIENCE))
    assert made.order(PATIENCE - 1) == [2, 1, 0]
    assert made.order(PATIENCE) == [0, 2, 1]


def test_only_what_would_be_computed_before_counts() -> None:
    made = prompts(sequence(100), sequence(10), sequence(20))
    assert made.reach(31) == (0, 100)
    assert made.reach(30) == (0, 20)
    assert made.reach(131) == NOBODY


def test_a_better_priority_is_computed_before() -> None:
    made = prompts(sequence(100, priority=-1), sequence(10, priority=1))
    assert made.reach(100) == (-1, 100)
    assert made.reach(101) == (1, 10)
    assert Prompts().reach(1) == NOBODY
