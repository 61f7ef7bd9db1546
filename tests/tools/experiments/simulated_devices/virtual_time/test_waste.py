"""KV waste on cases worked out by hand. Blocks hold 16 positions."""

import pytest

from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.shared.messages import pack
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from pagewire.shared.messages.work import Sampling
from tools.experiments.simulated_devices.virtual_time.waste import Waste


def policy(window: int = 1, budget: int = 512) -> Policy:
    return Policy(1, TermLimits(64, 16, 8, budget, window))


def sequence(number: int, prompt: list[int], output: int = 100) -> Sequence:
    return Sequence(number, prompt, len(prompt), Sampling(output), arrival_order=number)


def output(step: int, *rows: tuple[int, int, int, int]) -> StepOutput:
    """Rows of (sequence, start, count, token)."""
    sequences, starts, counts, tokens = (pack(row[i] for row in rows) for i in range(4))
    finishes = bytes([Finish.NONE] * len(rows))
    return StepOutput(1, step, step + 1, sequences, starts, counts, tokens, finishes, elapsed_us=0)


def test_unwritten_positions_of_a_prompt_are_waste() -> None:
    scheduler, waste = policy(), Waste()
    scheduler.add(sequence(1, list(range(40))))
    assert scheduler.schedule(0.0, None).plan is not None
    allocated = len(scheduler.running[0].blocks) * 16
    waste.sample(scheduler, output(0, (1, 0, 30, NO_TOKEN)))
    assert waste.samples == [(allocated - 30) / allocated]
    assert waste.running == [0]
    assert waste.queued == [10 / allocated]


def test_the_waste_tells_the_next_steps_blocks_from_later_ones() -> None:
    scheduler, waste = policy(), Waste()
    scheduler.add(sequence(1, list(range(40))))
    scheduler.schedule(0.0, None)
    allocated = len(scheduler.running[0].blocks) * 16
    waste.sample(scheduler, output(0, (1, 0, 10, NO_TOKEN)), output(1, (1, 10, 24, NO_TOKEN)))
    assert waste.samples == [(allocated - 10) / allocated]
    assert waste.running == [24 / allocated]
    assert waste.queued == [6 / allocated]


def test_tokens_that_the_scheduler_has_not_read_are_written() -> None:
    scheduler, waste = policy(window=8), Waste()
    scheduler.add(sequence(1, list(range(40))))
    scheduler.schedule(0.0, None)
    allocated = len(scheduler.running[0].blocks) * 16
    assert allocated >= 48
    first, second = output(0, (1, 0, 40, 7)), output(1, (1, 40, 1, 8))
    waste.sample(scheduler, first)
    waste.sample(scheduler, second)
    assert waste.samples == [(allocated - 40) / allocated, (allocated - 41) / allocated]
    assert waste.queued == [0, 0]


def test_shared_blocks_count_once_and_the_cache_alone_not_at_all() -> None:
    scheduler, waste = policy(), Waste()
    prompt = list(range(32))
    scheduler.add(sequence(1, [*prompt, 100]))
    scheduler.schedule(0.0, None)
    done = output(0, (1, 0, 33, 7))
    waste.sample(scheduler, done)
    scheduler.on_step(done)
    scheduler.add(sequence(2, [*prompt, 200]))
    scheduler.schedule(0.0, None)
    one, two = scheduler.running
    assert one.blocks[:2] == two.blocks[:2]
    waste.sample(scheduler, output(1, (1, 33, 1, 8), (2, 32, 1, 9)))
    distinct = len({*one.blocks, *two.blocks}) * 16
    assert waste.samples[1] == pytest.approx((distinct - (32 + 2 + 1)) / distinct)
    scheduler.abort(1)
    scheduler.abort(2)
    scheduler.schedule(0.0, None)
    scheduler.on_step(output(2))
    waste.sample(scheduler, output(2, (1, 34, 1, 8)))
    assert len(waste.samples) == 2, "what only the cache holds was counted"


def test_blocks_taken_from_a_sequence_are_empty_until_the_executor_answers() -> None:
    scheduler, waste = policy(), Waste()
    for number in (1, 2):
        scheduler.add(sequence(number, list(range(100 * number, 100 * number + 15))))
    scheduler.schedule(0.0, None)
    rows = output(0, (1, 0, 15, 7), (2, 0, 15, 7))
    waste.sample(scheduler, rows)
    scheduler.on_step(rows)
    scheduler.abort(2)
    scheduler.schedule(0.0, None)
    held = scheduler.pool.num_used * 16
    waste.sample(scheduler, output(1, (1, 15, 1, 8), (2, 15, 1, 8)))
    assert waste.samples[1] == pytest.approx((held - 16) / held)


def test_an_answer_without_rows_is_no_sample() -> None:
    scheduler, waste = policy(), Waste()
    scheduler.add(sequence(1, [1, 2, 3]))
    scheduler.schedule(0.0, None)
    waste.sample(scheduler, output(0))
    assert waste.samples == []
