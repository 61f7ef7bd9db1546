from dataclasses import dataclass, field

import msgspec
import pytest

from pagewire.services.scheduler.blocks import IntegrityError
from pagewire.services.scheduler.budget import PROMPT_TOKENS
from pagewire.services.scheduler.limits import Limits
from pagewire.services.scheduler.policy import BLOCKS_AHEAD, HELD_STEPS, READERS_LAG, Policy
from pagewire.services.scheduler.prompts import PATIENCE, STEPS_AHEAD
from pagewire.services.scheduler.sequence import Sequence, State
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.work import Sampling
from tests.support.executor import ModelExecutor, generate


def sampling(max_tokens: int = 8, stop_ids: tuple[int, ...] = ()) -> Sampling:
    return Sampling(max_tokens, stop_ids=pack(stop_ids))


@dataclass
class House:
    """The policy and an executor, with wires between them that the test reads when it likes."""

    limits: Limits
    policy: Policy = field(init=False)
    executor: ModelExecutor = field(init=False)
    wanted: dict[int, list[int]] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    arrivals: int = 0

    def __post_init__(self) -> None:
        self.policy = Policy(1, self.limits)
        self.executor = ModelExecutor(self.limits.num_blocks, self.limits.block_size)

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
            arrival=self.arrivals,
        )
        assert self.policy.limits.fits(sequence)
        self.sequences[sequence.id] = sequence
        self.wanted[sequence.id] = generate(prompt, max_tokens, list(stop_ids))
        self.policy.add(sequence)
        return sequence

    def plan(self) -> int:
        sent = 0
        while (plan := self.policy.schedule()) is not None:
            self.executor.plans.append(plan)
            sent += 1
        self.policy.check()
        return sent

    def read(self, count: int = 1) -> None:
        for _ in range(min(count, len(self.executor.outputs))):
            self.policy.on_step(self.executor.outputs.popleft())
            self.policy.check()

    def drain(self) -> None:
        for _ in range(5000):
            self.plan()
            moved = self.executor.run()
            self.read(99)
            if not moved and not self.policy.live:
                break
        self.plan()
        while self.executor.run():
            self.read(99)
        assert not self.policy.live, "sequences are stuck"
        assert self.policy.pool.available == self.limits.num_blocks, "blocks are lost"
        assert not self.executor.slots, "slots are lost"

    def assert_exact(self, *, dropped: frozenset[int] | set[int] = frozenset()) -> None:
        for i, sequence in self.sequences.items():
            got = sequence.tokens[sequence.prompt_tokens :]
            assert got == (self.wanted[i][: len(got)] if i in dropped else self.wanted[i])


LIMITS = Limits(num_blocks=64, block_size=4, max_num_seqs=8, budget=16, window=2)


def house(**changes: object) -> House:
    values = {name: getattr(LIMITS, name) for name in LIMITS.__slots__} | changes
    return House(Limits(**values))


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_every_sequence_gets_the_tokens_that_follow_its_prompt(window: int, prefix_cache: bool) -> None:
    home = house(window=window, prefix_cache=prefix_cache)
    for length in (1, 3, 4, 5, 17, 40):
        home.add([7] * length, max_tokens=5 + length)
    home.drain()
    home.assert_exact()


def test_the_lease_never_passes_the_last_reported_step_by_more_than_the_window() -> None:
    home = house(window=4)
    home.add([1, 2, 3], max_tokens=30)
    for _ in range(40):
        home.plan()
        assert home.policy.lease_until <= home.policy.runs + 4
        home.executor.run()
        assert home.executor.runs <= home.policy.lease_until
        home.read()


def test_a_long_lease_is_renewed_at_half_and_not_at_every_step() -> None:
    home = house(window=8)
    home.add([1, 2, 3], max_tokens=30)
    plans = 0
    for _ in range(24):
        plans += home.plan()
        home.executor.run()
        home.read()
    assert plans < 24 / 2


def test_the_lease_waits_for_the_slowest_reader() -> None:
    """Race 11."""
    home = house(window=8)
    home.add([1], max_tokens=40)
    home.policy.slowest_reader = 3 - READERS_LAG
    for _ in range(20):
        home.plan()
        home.executor.run()
        home.read(99)
    assert home.executor.step == 4
    home.policy.slowest_reader = None  # it has fallen silent
    home.drain()
    home.assert_exact()


@pytest.mark.parametrize("window", [1, 2])
def test_answers_without_a_step_do_not_use_up_the_lease(window: int) -> None:
    home = house(window=window)
    home.add([1], max_tokens=20)
    home.plan()
    home.executor.run()
    home.read()
    for i in range(3):  # plans that meet a lease that is used up, several at once on the wire
        home.add([i + 2], max_tokens=20)
        home.plan()
        home.executor.run()
        home.executor.run()
    home.drain()
    home.assert_exact()


def test_a_pool_too_small_for_all_preempts_the_youngest_and_loses_nothing() -> None:
    home = house(num_blocks=12, budget=32)
    first, *_, last = [home.add([i] * 6, max_tokens=30) for i in range(5)]
    home.drain()
    home.assert_exact()
    assert home.policy.preemptions > 0
    assert first.state is State.FINISHED
    assert last.state is State.FINISHED


def test_the_oldest_is_never_preempted() -> None:
    home = house(num_blocks=10, budget=32)
    oldest = home.add([1] * 6, max_tokens=30)
    for i in range(4):
        home.add([i + 2] * 6, max_tokens=30)
    seen = set()
    for _ in range(400):
        home.plan()
        home.executor.run()
        home.read(99)
        seen.add(oldest.state)
    assert seen <= {State.RUNNING, State.FINISHED}
    assert home.policy.preemptions > 0


def test_tokens_of_steps_before_a_preemption_are_kept_and_readmission_waits_for_the_answer() -> None:
    """Race 13."""
    home = house(num_blocks=8, budget=32, window=4)
    home.add([1] * 8, max_tokens=20)
    young = home.add([2] * 8, max_tokens=20)
    for _ in range(100):
        home.plan()
        home.executor.run()
        if young.state is State.PREEMPTED:
            break
        home.read()
    known = len(young.tokens)
    assert home.executor.outputs, "the test needs outputs that are still on the wire"
    while young.state is State.PREEMPTED:
        assert not home.plan() or young.slot not in [a.slot for p in home.executor.plans for a in p.added]
        home.executor.run()
        home.read()
    assert len(young.tokens) >= known
    home.drain()
    home.assert_exact()


def test_blocks_of_a_live_sequence_come_back_only_with_the_plans_answer() -> None:
    home = house()
    sequence = home.add([1] * 10, max_tokens=50)
    home.plan()
    for _ in range(3):
        home.executor.run()
    home.read()
    held = home.policy.pool.held
    assert home.policy.drop(sequence.id)
    home.plan()
    home.read()  # a step from before the plan: no answer
    assert home.policy.pool.held == held
    home.executor.run()
    home.read(99)
    assert home.policy.pool.held == 0
    home.drain()


def test_the_removal_of_the_last_slot_is_answered_by_an_empty_output() -> None:
    """Race 12."""
    home = house()
    sequence = home.add([1] * 3, max_tokens=50)
    home.plan()
    home.executor.run()
    home.read()
    home.policy.drop(sequence.id)
    home.plan()
    home.executor.run()
    assert home.executor.outputs[-1].sequences == b""
    home.read(99)
    assert home.policy.schedule() is None


def test_an_equal_prompt_waits_for_the_blocks_of_the_first_and_shares_them() -> None:
    home = house(budget=8)
    prompt = list(range(17))
    home.add(prompt)
    second = home.add(prompt)
    home.plan()
    assert second.state is State.WAITING
    home.drain()
    home.assert_exact()
    assert second.cached == 16


def test_the_last_token_of_a_known_prompt_is_computed_again_since_somebody_must_sample() -> None:
    home = house()
    home.add(list(range(16)))
    home.drain()
    again = home.add(list(range(16)))
    home.drain()
    home.assert_exact()
    assert again.cached == 12


def test_a_prefix_that_was_evicted_is_kept_again_once_it_was_computed_again() -> None:
    home = house(num_blocks=8, block_size=4)
    for prompt in ([1] * 12, [2] * 28, [1] * 12):  # the second takes every block
        home.add(prompt, max_tokens=2)
        home.drain()
    again = home.add([1] * 12)
    home.drain()
    home.assert_exact()
    assert again.cached == 8


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_when_the_first_of_two_equal_prompts_is_dropped_the_second_takes_over(steps: int) -> None:
    """Race 14: it reads only blocks that were confirmed."""
    home = house(budget=4, block_size=2)
    prompt = list(range(19))
    first = home.add(prompt)
    second = home.add(prompt)
    for _ in range(steps):
        home.plan()
        home.executor.run()
        home.read()
    home.plan()
    assert second in home.policy.waiting
    home.policy.drop(first.id)
    home.plan()
    assert second in home.policy.running
    home.drain()
    home.assert_exact(dropped={first.id})


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    home = house(prefix_cache=False)
    for _ in range(3):
        home.add(list(range(17)))
    home.drain()
    assert all(s.cached == 0 for s in home.sequences.values())


def test_long_prompts_are_spread_over_several_plans() -> None:
    """Race 17: no plan grows beyond what a message may hold."""
    home = house(num_blocks=600, max_plan_bytes=1000, budget=1024)
    for i in range(8):
        home.add([i] * 200, max_tokens=2)
    assert home.plan() >= 7
    assert all(sum(len(a.tokens) for a in plan.added) <= 1000 for plan in home.executor.plans)
    home.drain()
    home.assert_exact()


def test_a_lower_priority_number_goes_first() -> None:
    home = house(max_num_seqs=1)
    home.add([1])
    home.plan()
    home.add([2], priority=1)
    urgent = home.add([3], priority=0)
    while urgent.state is State.WAITING:
        home.plan()
        home.executor.run()
        home.read()
    assert [s.id for s in home.policy.waiting] == [2]
    home.drain()


def test_what_waits_past_its_deadline_gets_no_slot() -> None:
    home = house(max_num_seqs=1)
    home.add([1], max_tokens=3)
    home.plan()
    late, patient = home.add([2]), home.add([3])
    late.deadline = 50.0
    home.policy.now = 50.0
    home.drain()
    assert home.policy.expired == [late.id]
    assert (late.state, len(late.tokens)) == (State.FINISHED, 1)
    assert len(patient.tokens) == 9


def test_a_user_with_many_requests_does_not_hold_up_another() -> None:
    home = house(max_num_seqs=1)
    for _ in range(20):
        home.add([1], max_tokens=2).user = "a"
    home.plan()
    other = home.add([2], max_tokens=2)
    home.policy.waiting.remove(other)
    other.user = "b"
    home.policy.waiting.add(other)
    while other.state is not State.FINISHED:
        home.plan()
        home.executor.run()
        home.read()
    assert len(home.policy.waiting) >= 18
    home.drain()


def test_blocks_are_given_for_a_few_steps_however_long_the_lease_is() -> None:
    home = house(window=16, block_size=1)
    sequence = home.add([1] * 3, max_tokens=40)
    while sequence.state is not State.FINISHED:
        home.plan()
        assert len(sequence.blocks) <= len(sequence.tokens) - 1 + BLOCKS_AHEAD
        home.executor.run()
        home.read()
    home.assert_exact()


@pytest.mark.parametrize("window", [1, 8])
def test_a_long_prompt_gets_its_slot_though_shorter_ones_keep_coming(window: int) -> None:
    home = house(num_blocks=4000, budget=64, window=window, max_num_seqs=32, prefix_cache=False)
    home.add([1] * 900, max_tokens=1)
    home.plan()
    long = home.add([2] * 1000, max_tokens=1)
    steps = 0
    while long.state is State.WAITING:
        while len(home.policy.waiting) < 20:
            home.add([3] * 40, max_tokens=1)
        home.plan()
        steps += home.executor.run()
        home.read()
    assert steps >= HELD_STEPS, "the test puts no pressure on the long prompt"
    assert steps <= HELD_STEPS + 900 // 64 + STEPS_AHEAD + window
    home.drain()


def test_the_check_catches_a_double_free_and_a_lost_block() -> None:
    home = house()
    sequence = home.add([1] * 10)
    home.plan()
    lost = sequence.blocks.pop()
    with pytest.raises(IntegrityError):
        home.policy.check()
    sequence.blocks.append(lost)
    home.policy.check()
    home.policy.pool.release([lost])
    with pytest.raises(IntegrityError):
        home.policy.check()
    with pytest.raises(IntegrityError):
        home.policy.pool.release([lost])


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    home = house(num_blocks=600, budget=16)
    home.add([1] * 1000, max_tokens=2)
    for _ in range(5):
        home.plan()
        home.executor.run()
        home.read()
    short = home.add([2] * 10, max_tokens=2)
    steps = 0
    while len(short.tokens) == 10:
        home.plan()
        home.executor.run()
        home.read()
        steps += 1
    assert steps <= home.limits.window + 1
    home.drain()
    home.assert_exact()


@pytest.mark.parametrize("window", [1, 2, 8])
def test_a_long_prompt_is_passed_for_a_bounded_number_of_steps(window: int) -> None:
    home = house(num_blocks=2000, budget=16, window=window, max_num_seqs=12, prefix_cache=False)
    long = home.add([1] * 400, max_tokens=2)
    waited = longest = 0
    i = 0
    while long in home.policy.running or not i:
        i += 1
        while len(home.policy.waiting) < 4:
            home.add([i % 40 + 2] * 12, max_tokens=1)
        home.plan()
        before = home.executor.runs
        home.executor.run()
        ran = {sequence for output in home.executor.outputs for sequence in unpack(output.sequences)}
        waited = 0 if long.id in ran else waited + home.executor.runs - before
        longest = max(longest, waited)
        home.read()
    assert longest >= PATIENCE, "the test puts no pressure on the long prompt"
    assert longest <= PATIENCE + window + 1


def prompt_behind_a_decode(length: int = 6000, **limits: float) -> House:
    """One sequence decodes, or is about to, while the long prompt of another is computed."""
    home = house(num_blocks=2000, **limits)
    home.add([2] * 3, max_tokens=100)
    home.add([1] * length, max_tokens=2)
    return home


def widths_at(home: House, us_per_token: int, rounds: int = 30) -> list[int]:
    """Runs steps that take so long; the tokens of each."""
    widths = []
    for _ in range(rounds):
        home.plan()
        home.executor.run()
        outputs = list(home.executor.outputs)
        home.executor.outputs.clear()
        for output in outputs:
            widths.append(sum(unpack(output.counts)))
            home.policy.on_step(msgspec.structs.replace(output, elapsed_us=us_per_token * widths[-1]))
    return widths


def test_the_budget_follows_the_time_of_steps() -> None:
    home = prompt_behind_a_decode(length=1200, budget=32, itl_target_ms=1.0)
    widths = widths_at(home, us_per_token=100)
    assert widths[0] == 32
    assert max(widths[-10:]) <= 13
    home.drain()
    home.assert_exact()


def test_without_a_target_long_steps_shrink_but_have_room_for_prompts() -> None:
    home = prompt_behind_a_decode(budget=400, max_budget=800)
    widths = widths_at(home, us_per_token=1500)
    assert widths[0] == 400
    assert set(widths[-10:]) == {1 + PROMPT_TOKENS}
    home.drain()
    home.assert_exact()


def test_a_prompt_that_holds_up_nobody_is_computed_in_steps_of_the_usual_size() -> None:
    home = house(budget=400, max_budget=800, num_blocks=2000)
    home.add([1] * 6000, max_tokens=2)
    assert set(widths_at(home, us_per_token=1500, rounds=4)) == {400}
    home.drain()
    home.assert_exact()


def test_where_nothing_says_how_far_it_may_grow_the_budget_is_fixed() -> None:
    home = prompt_behind_a_decode(budget=400)
    assert set(widths_at(home, us_per_token=1500, rounds=5)) == {400}


def test_plans_name_each_growing_slot_once() -> None:
    home = house(window=8, block_size=4)
    home.add([1] * 3, max_tokens=40)
    for _ in range(30):
        home.plan()
        for plan in home.executor.plans:
            slots = unpack(plan.limits)[::2]
            assert len(slots) == len(set(slots))
        home.executor.run()
        home.read()
