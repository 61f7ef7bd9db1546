import math
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from pagewire.services.scheduler.policy.block_pool import IntegrityError
from pagewire.services.scheduler.policy.budget import MIN_PROMPT_TOKENS, Budget
from pagewire.services.scheduler.policy.policy import MAX_DELAY, MAX_READER_LAG, Policy
from pagewire.services.scheduler.policy.prefill_queue import PATIENCE, STEPS_AHEAD
from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.shared.block_tables import LOOKAHEAD_STEPS
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.work import Sampling
from tests.support.executor import ModelExecutor, generate


def sampling(max_tokens: int = 8, stop_ids: tuple[int, ...] = ()) -> Sampling:
    return Sampling(max_tokens, stop_ids=pack(stop_ids))


@dataclass
class Engine:
    """The policy and an executor, with wires between them that the test reads at its own pace."""

    limits: TermLimits
    policy: Policy = field(init=False)
    executor: ModelExecutor = field(init=False)
    expected: dict[int, list[int]] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    arrivals: int = 0
    now: float = 0.0
    slowest_reader: int | None = None
    expired: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = Policy(1, self.limits)
        self.executor = ModelExecutor(self.limits.num_blocks, self.limits.block_size, self.limits.windows)

    def add(
        self, prompt: list[int], max_tokens: int = 8, stop_ids: tuple[int, ...] = (), priority: int = 0
    ) -> Sequence:
        self.arrivals += 1
        sequence = Sequence(
            self.arrivals,
            list(prompt),
            len(prompt),
            sampling(max_tokens, stop_ids),
            priority=priority,
            arrival_order=self.arrivals,
        )
        assert self.policy.limits.fits(sequence)
        self.sequences[sequence.id] = sequence
        self.expected[sequence.id] = generate(prompt, max_tokens, list(stop_ids))
        self.policy.add(sequence)
        return sequence

    def plan(self) -> int:
        sent = 0
        while (decision := self.policy.schedule(self.now, self.slowest_reader)).plan is not None:
            self.executor.plans.append(decision.plan)
            self.expired += decision.expired
            sent += 1
        self.expired += decision.expired
        self.policy.sequences.check()
        return sent

    def read(self, count: int = 1) -> None:
        for _ in range(min(count, len(self.executor.outputs))):
            self.policy.on_step(self.executor.outputs.popleft())
            self.policy.sequences.check()

    def drain(self) -> None:
        for _ in range(5000):
            self.plan()
            moved = self.executor.run()
            self.read(99)
            if not moved and not self.policy.num_unfinished:
                break
        self.plan()
        while self.executor.run():
            self.read(99)
        assert not self.policy.num_unfinished, "sequences are stuck"
        assert self.policy.pool.num_free == self.limits.num_blocks, "blocks are lost"
        assert not self.executor.slots, "slots are lost"

    def assert_exact(self, *, aborted: frozenset[int] | set[int] = frozenset()) -> None:
        for i, sequence in self.sequences.items():
            got = sequence.tokens[sequence.num_prompt_tokens :]
            assert got == (self.expected[i][: len(got)] if i in aborted else self.expected[i])


LIMITS = TermLimits(num_blocks=64, block_size=4, max_num_seqs=8, budget=16, window=2)


def make_engine(**changes: Any) -> Engine:
    return Engine(replace(LIMITS, **changes))


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_every_sequence_gets_the_tokens_that_follow_its_prompt(window: int, prefix_cache: bool) -> None:
    engine = make_engine(window=window, prefix_cache=prefix_cache)
    for length in (1, 3, 4, 5, 17, 40):
        engine.add([7] * length, max_tokens=5 + length)
    engine.drain()
    engine.assert_exact()


def test_the_lease_never_passes_the_last_reported_step_by_more_than_the_window() -> None:
    engine = make_engine(window=4)
    engine.add([1, 2, 3], max_tokens=30)
    for _ in range(40):
        engine.plan()
        assert engine.policy.lease_until <= engine.policy.num_steps + 4
        engine.executor.run()
        assert engine.executor.runs <= engine.policy.lease_until
        engine.read()


def test_a_long_lease_is_renewed_at_half_and_not_at_every_step() -> None:
    engine = make_engine(window=8)
    engine.add([1, 2, 3], max_tokens=30)
    plans = 0
    for _ in range(24):
        plans += engine.plan()
        engine.executor.run()
        engine.read()
    assert plans < 24 / 2


def test_a_long_prompt_holds_only_the_blocks_that_the_steps_ahead_fill() -> None:
    engine = make_engine(budget=16, block_size=4, window=2)
    long = engine.add([1] * 100)
    engine.plan()
    assert engine.policy.pool.num_used == len(long.blocks) == 2 * 16 // 4
    engine.executor.run()
    engine.read()
    engine.plan()
    assert engine.policy.pool.num_used == 3 * 16 // 4
    engine.drain()
    engine.assert_exact()
    assert engine.policy.preemptions == 0


def test_a_prompt_beside_decodes_holds_blocks_for_the_room_that_they_leave() -> None:
    engine = make_engine(budget=16, block_size=4, window=2)
    for i in range(6):
        engine.add([i], max_tokens=40)
    engine.plan()
    engine.executor.run()
    engine.read()
    long = engine.add([9] * 90)
    engine.plan()
    assert len(long.blocks) == 2 * (16 - 6) // 4
    engine.executor.run()
    sizes = []
    for _ in range(6):  # the executor is a step ahead of what the policy has read
        engine.executor.run()
        sizes.append(sum(unpack(engine.executor.outputs[-1].counts)))
        engine.read()
        engine.plan()
    assert sizes == [16] * 6, "a prompt waits, and a step has room"
    engine.read(99)
    engine.drain()
    engine.assert_exact()


def test_blocks_reserved_for_a_prompt_admit_no_other_sequence() -> None:
    engine = make_engine(budget=16, block_size=4, window=2, num_blocks=32)
    engine.add([1] * 100, max_tokens=2)
    other = engine.add([2] * 40, max_tokens=2)
    engine.plan()
    assert engine.policy.pool.num_used < 32 - 11, "the test needs room that is not used yet"
    assert other.state is SequenceState.WAITING
    engine.drain()
    engine.assert_exact()
    assert engine.policy.preemptions == 0


@pytest.mark.parametrize("windows", [(8,), (0, 8, 8)])
def test_a_prompt_holds_its_windows_and_ends_under_any_budget(windows: tuple[int, ...]) -> None:
    engine = make_engine(windows=windows, budget=8, num_blocks=64 * len(windows))
    engine.policy.budget = Budget(64, 64, math.inf)  # as a budget that has grown
    most = engine.policy.limits.entries_of(8)
    long = engine.add([1] * 200, max_tokens=20)
    while engine.plan() or engine.executor.run():
        engine.read(99)
        if long.state is SequenceState.RUNNING:
            assert all(len(long.blocks) // len(windows) - first <= most for first in long.given_back)
    engine.drain()
    engine.assert_exact()


def test_a_preempted_prompt_gives_up_its_reserved_blocks() -> None:
    engine = make_engine(budget=16, block_size=4, window=2, num_blocks=32)
    for i in range(3):
        engine.add([i] * 8, max_tokens=20)
    engine.plan()
    engine.executor.run()
    engine.read()
    prompt = engine.add([9] * 80, max_tokens=2)
    engine.plan()
    assert prompt.num_reserved_blocks
    while prompt.state is SequenceState.RUNNING:  # until the older ones need what it has
        engine.executor.run()
        engine.read()
        engine.plan()
    assert prompt.state is SequenceState.PREEMPTED
    assert engine.policy.pool.reserved == 0
    engine.drain()
    engine.assert_exact()


def test_the_lease_waits_for_the_slowest_reader() -> None:
    engine = make_engine(window=8)
    engine.add([1], max_tokens=40)
    engine.slowest_reader = 3 - MAX_READER_LAG
    for _ in range(20):
        engine.plan()
        engine.executor.run()
        engine.read(99)
    assert engine.executor.step == 4
    engine.slowest_reader = None  # it has fallen silent
    engine.drain()
    engine.assert_exact()


@pytest.mark.parametrize("window", [1, 2])
def test_answers_without_a_step_do_not_use_up_the_lease(window: int) -> None:
    engine = make_engine(window=window)
    engine.add([1], max_tokens=20)
    engine.plan()
    engine.executor.run()
    engine.read()
    for i in range(3):  # plans that meet a lease that is used up, several at once on the wire
        engine.add([i + 2], max_tokens=20)
        engine.plan()
        engine.executor.run()
        engine.executor.run()
    engine.drain()
    engine.assert_exact()


def test_a_pool_too_small_for_all_preempts_the_youngest_and_loses_nothing() -> None:
    engine = make_engine(num_blocks=12, budget=32)
    first, *_, last = [engine.add([i] * 6, max_tokens=30) for i in range(5)]
    engine.drain()
    engine.assert_exact()
    assert engine.policy.preemptions > 0
    assert first.state is SequenceState.FINISHED
    assert last.state is SequenceState.FINISHED


def test_the_oldest_sequence_is_never_preempted() -> None:
    engine = make_engine(num_blocks=10, budget=32)
    oldest = engine.add([1] * 6, max_tokens=30)
    for i in range(4):
        engine.add([i + 2] * 6, max_tokens=30)
    states = set()
    for _ in range(400):
        engine.plan()
        engine.executor.run()
        engine.read(99)
        states.add(oldest.state)
    assert states <= {SequenceState.RUNNING, SequenceState.FINISHED}
    assert engine.policy.preemptions > 0


def test_tokens_before_a_preemption_are_kept_and_readmission_waits() -> None:
    engine = make_engine(num_blocks=8, budget=32, window=4)
    engine.add([1] * 8, max_tokens=20)
    young = engine.add([2] * 8, max_tokens=20)
    for _ in range(100):
        engine.plan()
        engine.executor.run()
        if young.state is SequenceState.PREEMPTED:
            break
        engine.read()
    length = len(young.tokens)
    assert engine.executor.outputs, "the test needs outputs that are still on the wire"
    while young.state is SequenceState.PREEMPTED:
        assert not engine.plan() or young.slot not in [a.slot for p in engine.executor.plans for a in p.added]
        engine.executor.run()
        engine.read()
    assert len(young.tokens) >= length
    engine.drain()
    engine.assert_exact()


def test_blocks_of_a_live_sequence_come_back_only_with_the_plans_answer() -> None:
    engine = make_engine()
    sequence = engine.add([1] * 10, max_tokens=50)
    engine.plan()
    for _ in range(3):
        engine.executor.run()
    engine.read()
    held = engine.policy.pool.num_used
    assert engine.policy.abort(sequence.id)
    engine.plan()
    engine.read()  # a step from before the plan: no answer
    assert engine.policy.pool.num_used == held
    engine.executor.run()
    engine.read(99)
    assert engine.policy.pool.num_used == 0
    engine.drain()


def test_the_removal_of_the_last_slot_is_answered_by_an_empty_output() -> None:
    engine = make_engine()
    sequence = engine.add([1] * 3, max_tokens=50)
    engine.plan()
    engine.executor.run()
    engine.read()
    engine.policy.abort(sequence.id)
    engine.plan()
    engine.executor.run()
    assert engine.executor.outputs[-1].sequences == b""
    engine.read(99)
    assert engine.policy.schedule(0.0, None).plan is None


def test_an_equal_prompt_waits_for_the_blocks_of_the_first_and_shares_them() -> None:
    engine = make_engine(budget=8)
    prompt = list(range(17))
    engine.add(prompt)
    second = engine.add(prompt)
    engine.plan()
    assert second.state is SequenceState.WAITING
    engine.drain()
    engine.assert_exact()
    assert second.num_cached_tokens == 16


def test_the_last_token_of_a_cached_prompt_is_computed_again_for_its_logits() -> None:
    engine = make_engine()
    engine.add(list(range(16)))
    engine.drain()
    again = engine.add(list(range(16)))
    engine.drain()
    engine.assert_exact()
    assert again.num_cached_tokens == 12


def test_a_prefix_that_was_evicted_is_kept_again_once_it_was_computed_again() -> None:
    engine = make_engine(num_blocks=8, block_size=4)
    for prompt in ([1] * 12, [2] * 28, [1] * 12):  # the second takes every block
        engine.add(prompt, max_tokens=2)
        engine.drain()
    again = engine.add([1] * 12)
    engine.drain()
    engine.assert_exact()
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_when_the_first_of_two_equal_prompts_is_aborted_the_second_takes_over(steps: int) -> None:
    """It reads only blocks that were confirmed."""
    engine = make_engine(budget=4, block_size=2)
    prompt = list(range(19))
    first = engine.add(prompt)
    second = engine.add(prompt)
    for _ in range(steps):
        engine.plan()
        engine.executor.run()
        engine.read()
    engine.plan()
    assert second in engine.policy.waiting
    engine.policy.abort(first.id)
    engine.plan()
    assert second in engine.policy.running
    engine.drain()
    engine.assert_exact(aborted={first.id})


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    engine = make_engine(prefix_cache=False)
    for _ in range(3):
        engine.add(list(range(17)))
    engine.drain()
    assert all(s.num_cached_tokens == 0 for s in engine.sequences.values())


def test_long_prompts_are_spread_over_several_plans() -> None:
    """No plan grows beyond what a message may hold."""
    engine = make_engine(num_blocks=600, max_plan_bytes=1000, budget=1024)
    for i in range(8):
        engine.add([i] * 200, max_tokens=2)
    assert engine.plan() >= 7
    assert all(sum(len(a.tokens) for a in plan.added) <= 1000 for plan in engine.executor.plans)
    engine.drain()
    engine.assert_exact()


def test_a_lower_priority_number_goes_first() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add([1])
    engine.plan()
    engine.add([2], priority=1)
    urgent = engine.add([3], priority=0)
    while urgent.state is SequenceState.WAITING:
        engine.plan()
        engine.executor.run()
        engine.read()
    assert [s.id for s in engine.policy.waiting] == [2]
    engine.drain()


def test_a_sequence_past_its_deadline_gets_no_slot() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add([1], max_tokens=3)
    engine.plan()
    late, patient = engine.add([2]), engine.add([3])
    late.deadline = 50.0
    engine.now = 50.0
    engine.drain()
    assert engine.expired == [late.id]
    assert (late.state, len(late.tokens)) == (SequenceState.FINISHED, 1)
    assert len(patient.tokens) == 9


def test_a_user_with_many_requests_does_not_hold_up_another() -> None:
    engine = make_engine(max_num_seqs=1)
    for _ in range(20):
        engine.add([1], max_tokens=2).user = "a"
    engine.plan()
    other = engine.add([2], max_tokens=2)
    engine.policy.waiting.remove(other)
    other.user = "b"
    engine.policy.waiting.add(other)
    while other.state is not SequenceState.FINISHED:
        engine.plan()
        engine.executor.run()
        engine.read()
    assert len(engine.policy.waiting) >= 18
    engine.drain()


def test_blocks_are_given_for_a_few_steps_however_long_the_lease_is() -> None:
    engine = make_engine(window=16, block_size=1)
    sequence = engine.add([1] * 3, max_tokens=40)
    while sequence.state is not SequenceState.FINISHED:
        engine.plan()
        assert len(sequence.blocks) <= len(sequence.tokens) - 1 + LOOKAHEAD_STEPS
        engine.executor.run()
        engine.read()
    engine.assert_exact()


@pytest.mark.parametrize("window", [1, 8])
def test_a_long_prompt_gets_its_slot_though_shorter_ones_keep_coming(window: int) -> None:
    engine = make_engine(num_blocks=4000, budget=64, window=window, max_num_seqs=32, prefix_cache=False)
    engine.add([1] * 900, max_tokens=1)
    engine.plan()
    long = engine.add([2] * 1000, max_tokens=1)
    steps = 0
    while long.state is SequenceState.WAITING:
        while len(engine.policy.waiting) < 20:
            engine.add([3] * 40, max_tokens=1)
        engine.plan()
        steps += engine.executor.run()
        engine.read()
    assert steps >= MAX_DELAY, "the test puts no pressure on the long prompt"
    assert steps <= MAX_DELAY + 900 // 64 + STEPS_AHEAD + window
    engine.drain()


def test_the_check_catches_a_double_free_and_a_lost_block() -> None:
    engine = make_engine()
    sequence = engine.add([1] * 10)
    engine.plan()
    lost = sequence.blocks.pop()
    with pytest.raises(IntegrityError):
        engine.policy.sequences.check()
    sequence.blocks.append(lost)
    engine.policy.sequences.check()
    engine.policy.pool.free([lost])
    with pytest.raises(IntegrityError):
        engine.policy.sequences.check()
    with pytest.raises(IntegrityError):
        engine.policy.pool.free([lost])


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = make_engine(num_blocks=600, budget=16)
    engine.add([1] * 1000, max_tokens=2)
    for _ in range(5):
        engine.plan()
        engine.executor.run()
        engine.read()
    short = engine.add([2] * 10, max_tokens=2)
    steps = 0
    while len(short.tokens) == 10:
        engine.plan()
        engine.executor.run()
        engine.read()
        steps += 1
    assert steps <= engine.limits.window + 1
    engine.drain()
    engine.assert_exact()


@pytest.mark.parametrize("window", [1, 2, 8])
def test_a_long_prompt_is_passed_for_a_bounded_number_of_steps(window: int) -> None:
    engine = make_engine(num_blocks=2000, budget=16, window=window, max_num_seqs=12, prefix_cache=False)
    long = engine.add([1] * 400, max_tokens=2)
    waited = longest = 0
    i = 0
    while long in engine.policy.running or not i:
        i += 1
        while len(engine.policy.waiting) < 4:
            engine.add([i % 40 + 2] * 12, max_tokens=1)
        engine.plan()
        before = engine.executor.runs
        engine.executor.run()
        ran = {sequence for output in engine.executor.outputs for sequence in unpack(output.sequences)}
        waited = 0 if long.id in ran else waited + engine.executor.runs - before
        longest = max(longest, waited)
        engine.read()
    assert longest >= PATIENCE, "the test puts no pressure on the long prompt"
    assert longest <= PATIENCE + window + 1


def prompt_behind_a_decode(length: int = 6000, **limits: float) -> Engine:
    """Returns an engine in which one sequence decodes, or is about to, beside the long prompt of another."""
    engine = make_engine(num_blocks=2000, **limits)
    engine.add([2] * 3, max_tokens=100)
    engine.add([1] * length, max_tokens=2)
    return engine


def totals_at(engine: Engine, us_per_token: int, rounds: int = 30) -> list[int]:
    """Runs steps of this speed; returns the tokens of each."""
    totals = []
    for _ in range(rounds):
        engine.plan()
        engine.executor.run()
        outputs = list(engine.executor.outputs)
        engine.executor.outputs.clear()
        for output in outputs:
            totals.append(sum(unpack(output.counts)))
            engine.policy.on_step(msgspec.structs.replace(output, elapsed_us=us_per_token * totals[-1]))
    return totals


def test_the_budget_follows_the_time_of_steps() -> None:
    engine = prompt_behind_a_decode(length=1200, budget=32, itl_target_ms=1.0)
    totals = totals_at(engine, us_per_token=100)
    assert totals[0] == 32
    assert max(totals[-10:]) <= 13
    engine.drain()
    engine.assert_exact()


def test_without_a_target_long_steps_shrink_but_have_room_for_prompts() -> None:
    engine = prompt_behind_a_decode(budget=400, max_budget=800)
    totals = totals_at(engine, us_per_token=1500)
    assert totals[0] == 400
    assert set(totals[-10:]) == {1 + MIN_PROMPT_TOKENS}
    engine.drain()
    engine.assert_exact()


def test_a_prompt_without_decodes_is_computed_in_steps_of_the_usual_size() -> None:
    engine = make_engine(budget=400, max_budget=800, num_blocks=2000)
    engine.add([1] * 6000, max_tokens=2)
    assert set(totals_at(engine, us_per_token=1500, rounds=4)) == {400}
    engine.drain()
    engine.assert_exact()


def test_the_budget_is_fixed_where_the_device_names_no_maximum() -> None:
    engine = prompt_behind_a_decode(budget=400)
    assert set(totals_at(engine, us_per_token=1500, rounds=5)) == {400}


def test_between_two_plans_a_policy_whose_sequences_decode_is_settled() -> None:
    engine = make_engine(num_blocks=64, block_size=16, budget=64, window=8)
    engine.add([1] * 20, max_tokens=40)
    settled = []
    for _ in range(30):
        engine.plan()
        engine.executor.run()
        engine.read()
        settled.append(engine.policy.is_settled)
    assert sum(settled) > len(settled) / 2
    engine.add([1] * 20)
    assert not engine.policy.is_settled
    engine.drain()
    engine.assert_exact()


def test_plans_name_each_growing_slot_once() -> None:
    engine = make_engine(window=8, block_size=4)
    engine.add([1] * 3, max_tokens=40)
    for _ in range(30):
        engine.plan()
        for plan in engine.executor.plans:
            slots = unpack(plan.limits)[::2]
            assert len(slots) == len(set(slots))
        engine.executor.run()
        engine.read()


def test_the_computed_part_of_a_prompt_survives_a_new_term_of_its_executor() -> None:
    engine = make_engine(num_blocks=64, block_size=4, budget=16)
    prompt = engine.add(list(range(100)))
    engine.plan()
    for _ in range(3):
        engine.executor.run()
        engine.read()
        engine.plan()
    assert prompt.num_computed_tokens == 48
    engine.executor.run()  # its output is never read
    kv = engine.executor.kv
    engine.policy = Policy(2, LIMITS, engine.policy)
    engine.executor = ModelExecutor(LIMITS.num_blocks, LIMITS.block_size, LIMITS.windows, kv=kv)
    engine.sequences.clear()
    again = engine.add(list(range(100)))
    engine.plan()
    assert again.num_computed_tokens == 48
    engine.drain()
    engine.assert_exact()
