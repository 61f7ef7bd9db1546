from pagewire.services.scheduler.policy.prefill_queue import NO_CUTOFF, PATIENCE, PrefillQueue
from pagewire.services.scheduler.policy.sequence import Sequence
from tests.services.scheduler.policy.cases import sequence


def queue(*running: Sequence) -> PrefillQueue:
    for slot, one in enumerate(running):
        one.slot = slot
    return PrefillQueue({one.id: one for one in running})


def order(prompts: PrefillQueue, num_steps: int) -> list[int]:
    return [one.slot for one in prompts.in_order(num_steps)]


def test_the_shortest_prompt_goes_first() -> None:
    assert order(queue(sequence(30), sequence(10), sequence(20)), 0) == [1, 2, 0]
    assert order(queue(sequence(30)), 0) == [0]


def test_the_remaining_tokens_of_a_prompt_count() -> None:
    assert order(queue(sequence(30, num_computed_tokens=25), sequence(10)), 0) == [0, 1]


def test_a_prompt_that_was_passed_for_too_long_goes_first() -> None:
    prompts = queue(sequence(30), sequence(10, last_step=PATIENCE), sequence(5, priority=-1, last_step=PATIENCE))
    assert order(prompts, PATIENCE - 1) == [2, 1, 0]
    assert order(prompts, PATIENCE) == [0, 2, 1]


def test_only_tokens_computed_before_a_prompt_count() -> None:
    prompts = queue(sequence(100), sequence(10), sequence(20))
    assert prompts.cutoff(31) == (0, 100)
    assert prompts.cutoff(30) == (0, 20)
    assert prompts.cutoff(131) == NO_CUTOFF


def test_a_prompt_of_a_better_priority_is_computed_first() -> None:
    prompts = queue(sequence(100, priority=-1), sequence(10, priority=1))
    assert prompts.cutoff(100) == (-1, 100)
    assert prompts.cutoff(101) == (1, 10)
    assert PrefillQueue().cutoff(1) == NO_CUTOFF
