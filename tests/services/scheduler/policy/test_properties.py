"""The policy loses, mixes up and starves nothing, whatever happens between it and an executor that lags."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pagewire.services.scheduler.policy.beam_search import beam_scheduler
from pagewire.services.scheduler.policy.beam_search.beam_scheduler import BeamScheduler
from pagewire.services.scheduler.policy.beam_search.fork_blocks import fork_blocks
from pagewire.services.scheduler.policy.beam_search.ranking import BeamSearch
from pagewire.services.scheduler.policy.block_pool import BlockPool, IntegrityError
from pagewire.services.scheduler.policy.pending_frees import PendingFrees
from pagewire.services.scheduler.policy.policy import Decision, Policy
from pagewire.services.scheduler.policy.prefill_queue import PATIENCE, STEPS_AHEAD
from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from pagewire.services.scheduler.policy.sequence_table import SequenceTable
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.services.scheduler.policy.waiting_queue import WaitingQueue
from pagewire.shared.block_tables import LOOKAHEAD_STEPS
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.work import Sampling
from tests.services.scheduler.policy.lagging import LaggingExecutor
from tests.support.beam import run_search
from tests.support.executor import generate, next_logprobs

STEPS = 80


@dataclass
class Completion:
    """A requested completion, over all terms."""

    sequence: Sequence
    tokens: list[int]
    """All tokens that it must generate unless it is aborted."""
    aborted: bool = False
    others: list["Completion"] = field(default_factory=list)
    """The other completions of its beam search, if it is the first of one."""
    rank: int = 0
    """Place of the result of a beam search."""


class Scheduling(RuleBasedStateMachine):
    """One policy and one executor at a time."""

    @initialize(
        num_blocks=st.sampled_from([11, 16, 40]),
        windows=st.sampled_from([(0,), (0,), (0, 5), (0, 3, 3), (6,), (0, 0, 9)]),
        block_size=st.sampled_from([4, 8]),
        budget=st.sampled_from([2, 7, 32]),
        window=st.sampled_from([1, 2, 5, 8]),
        prefix_cache=st.booleans(),
        depth=st.integers(0, 2),
        most=st.sampled_from([1, 1, 3]),
    )
    def begin(
        self,
        num_blocks: int,
        windows: tuple[int, ...],
        block_size: int,
        budget: int,
        window: int,
        prefix_cache: bool,
        depth: int,
        most: int,
    ) -> None:
        self.limits = TermLimits(
            num_blocks * len(windows), block_size, 6, budget, window, prefix_cache, windows=windows
        )
        self.depth = depth
        self.most = most
        self.completions: list[Completion] = []
        self.live: dict[int, Completion] = {}
        self.ids = 0
        self.now = 0.0
        self.begin_term(1)

    def begin_term(self, term: int, *, same: bool = False) -> None:
        """`same`: the executor of the last term goes on, with its blocks."""
        self.policy: Policy = Policy(term, self.limits, self.policy if same else None)
        kv = self.executor.kv if same else {}
        self.executor: LaggingExecutor = LaggingExecutor(
            self.limits.num_blocks, self.limits.block_size, self.limits.windows, kv=kv, depth=self.depth, most=self.most
        )
        self.read = 0

    @rule(
        length=st.integers(1, 30),
        text=st.integers(0, 2),  # few, so that prefixes meet
        max_tokens=st.integers(1, 12),
        stops=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        user=st.sampled_from(["a", "b"]),
        patience=st.sampled_from([math.inf, math.inf, 5.0]),
        times=st.integers(1, 4),
    )
    def add(
        self,
        length: int,
        text: int,
        max_tokens: int,
        stops: bool,
        priority: int,
        user: str,
        patience: float,
        times: int,
    ) -> None:
        for i in range(times):
            prompt = [(j // 7 + text + i // 2) % 3 for j in range(length + i)]
            self.ask(prompt, max_tokens, stops, priority, user, patience)

    def ask(self, prompt: list[int], max_tokens: int, stops: bool, priority: int, user: str, patience: float) -> None:
        stop_ids = (3, 9) if stops else ()
        sequence = Sequence(
            id=0,
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            sampling=Sampling(max_tokens, stop_ids=pack(stop_ids)),
            priority=priority,
            arrival_order=len(self.completions),
            arrival_time=self.now,
            deadline=self.now + patience,
            user=user,
        )
        if self.policy.limits.fits(sequence):
            completion = Completion(sequence, generate(prompt, max_tokens, list(stop_ids)))
            self.completions.append(completion)
            self.submit(completion, prompt)

    @rule(
        length=st.integers(1, 30),
        text=st.integers(0, 2),
        max_tokens=st.integers(1, 5),
        width=st.integers(1, 3),
        n=st.integers(1, 2),
        penalty=st.sampled_from([1.0, 0.0, 3.0]),
        stops=st.booleans(),
        priority=st.sampled_from([0, 0, 1, -1]),
        user=st.sampled_from(["a", "b"]),
        patience=st.sampled_from([math.inf, math.inf, 5.0]),
    )
    def search(
        self,
        length: int,
        text: int,
        max_tokens: int,
        width: int,
        n: int,
        penalty: float,
        stops: bool,
        priority: int,
        user: str,
        patience: float,
    ) -> None:
        if sum(completion.sequence.sampling.beam_width > 0 for completion in self.live.values()) > 3:
            return  # in a tiny pool the beams of many are computed anew in every round
        prompt = [(j // 7 + text) % 3 for j in range(length)]
        stop_ids = tuple(range(10)) if stops else ()
        candidates = width + len(stop_ids)
        choice = Sequence(
            id=0,
            tokens=prompt,
            num_prompt_tokens=length,
            sampling=Sampling(
                max_tokens, stop_ids=pack(stop_ids), beam_width=width, length_penalty=penalty, candidates=candidates
            ),
            priority=priority,
            arrival_order=len(self.completions),
            arrival_time=self.now,
            deadline=self.now + patience,
            user=user,
        )
        if not self.policy.limits.fits(choice):
            return
        finished = run_search(BeamSearch(width, max_tokens, penalty, stop_ids), prompt, candidates, next_logprobs)
        group = [
            Completion(replace(choice), hypothesis.tokens, rank=number)
            for number, hypothesis in enumerate(finished[: min(n, width)])
        ]
        group[0].others = group[1:]
        self.completions += group
        self.submit_search(group)

    def submit_search(self, group: list[Completion]) -> None:
        for completion in group:
            self.ids += 1
            completion.sequence = self.anew(completion.sequence, completion.sequence.tokens)
            self.live[self.ids] = completion
        self.policy.beam_search.add([completion.sequence for completion in group])

    def submit(self, completion: Completion, tokens: list[int]) -> None:
        """Gives the policy a sequence that already has these tokens."""
        self.ids += 1
        completion.sequence = self.anew(completion.sequence, tokens)
        self.live[self.ids] = completion
        self.policy.add(completion.sequence)

    def anew(self, old: Sequence, tokens: list[int]) -> Sequence:
        return Sequence(
            id=self.ids,
            tokens=list(tokens),
            num_prompt_tokens=old.num_prompt_tokens,
            sampling=old.sampling,
            priority=old.priority,
            arrival_order=old.arrival_order,
            arrival_time=old.arrival_time,
            deadline=old.deadline,
            user=old.user,
        )

    @rule(choice=st.integers(0, 50), steps=st.integers(0, 8))
    def abort(self, choice: int, steps: int) -> None:
        """Aborts a sequence while the executor is ahead by steps that are not read yet."""
        self.run_ahead(steps)
        if self.live:
            completion = [completion for completion in self.live.values() if not completion.rank][
                choice % self.requests
            ]
            assert self.policy.abort(completion.sequence.id)
            for each in (completion, *completion.others):
                self.ended(each, aborted=True)
            self.plan()

    @property
    def requests(self) -> int:
        return sum(not completion.rank for completion in self.live.values())

    def ended(self, completion: Completion, *, aborted: bool) -> None:
        completion.aborted = aborted
        del self.live[completion.sequence.id]

    @rule()
    def plan(self) -> None:
        planned = True
        while planned:
            prompts = list(self.policy.sequences.prefills.values())
            settled = self.policy.is_settled
            decision = self.policy.schedule(self.now, None)
            assert not settled or decision == Decision(None, [], [], [])
            for sequence in decision.expired:
                assert self.live[sequence].sequence.deadline <= self.now
                self.ended(self.live[sequence], aborted=True)
            for search in decision.searches:
                for choice in search.choices:
                    assert choice.finish
                    self.ended(self.live[choice.id], aborted=False)
            planned = decision.plan is not None
            if decision.plan is not None:
                self.assert_admissions(decision.plan, prompts)
                self.executor.plans_in.send(decision.plan)

    @rule(count=st.integers(1, 4))
    def deliver_plans(self, count: int) -> None:
        for _ in range(count):
            self.executor.plans.extend(self.executor.plans_in.receive())

    @rule(steps=st.integers(1, 8))
    def run_ahead(self, steps: int) -> None:
        for _ in range(steps):
            self.executor.begin_step()

    @rule()
    def end_step(self) -> None:
        self.executor.end_step()

    @rule(count=st.integers(1, 4))
    def deliver_steps(self, count: int) -> None:
        for _ in range(count):
            self.take(caught_up=False)

    def take(self, *, caught_up: bool) -> None:
        wire = self.executor.steps_out
        for output in wire.catch_up() if caught_up else wire.receive():
            self.policy.on_step(output)
            self.read = output.step + 1
            for sequence, finish in zip(unpack(output.sequences), output.finishes, strict=True):
                if finish and sequence in self.live:
                    self.ended(self.live[sequence], aborted=False)

    @rule(times=st.integers(1, 6))
    def go_on(self, times: int) -> None:
        """As on a quiet day, but with steps in flight."""
        for _ in range(times):
            self.plan()
            self.deliver_plans(1)
            self.run_ahead(1)
            self.deliver_steps(1)

    @rule(plans=st.booleans())
    def lose(self, plans: bool) -> None:
        (self.executor.plans_in if plans else self.executor.steps_out).lose()

    @rule(plans=st.booleans())
    def repeat(self, plans: bool) -> None:
        (self.executor.plans_in if plans else self.executor.steps_out).repeat()

    @rule()
    def hear_heartbeats(self) -> None:
        self.executor.plans.extend(self.executor.plans_in.catch_up())
        self.take(caught_up=True)

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    @rule(rarely=st.integers(0, 15), same=st.booleans())
    def lose_executor(self, rarely: int, same: bool) -> None:
        if not rarely:
            unfinished = [(completion, completion.sequence.tokens) for completion in self.live.values()]
            self.live.clear()
            self.begin_term(self.policy.term + 1, same=same)
            for completion, tokens in unfinished:
                if completion.sequence.sampling.beam_width:
                    if not completion.rank:
                        self.submit_search([completion, *completion.others])
                else:
                    self.submit(completion, tokens)

    @invariant()
    def books_balance(self) -> None:
        self.policy.sequences.check()

    @invariant()
    def nobody_writes_to_what_is_not_its_own(self) -> None:
        """Not even steps that began before the scheduler took the block away, until it has read them."""
        holders = [*self.policy.running, *self.policy.sequences.pending_frees]
        held = {sequence.id: set(sequence.blocks) for sequence in holders}
        for step in range(self.read, self.executor.step):
            for sequence, blocks in self.executor.written.get(step, ()):
                assert blocks <= held.get(sequence, set()), "a block was given away under a step in flight"
        size, groups = self.limits.block_size, self.policy.sequences.groups
        writable = Counter(b for s in holders for b in s.blocks[s.num_computed_tokens // size * groups.count :])
        readers = Counter(
            b for s in holders for b in [*groups.all_of(s.blocks), *groups.seen_of(s.blocks, s.given_back)]
        )
        assert all(readers[block] == 1 for block in writable), "a block has two owners and is not yet full"

    @invariant()
    def little_is_wasted(self) -> None:
        steps, size = min(self.limits.window, LOOKAHEAD_STEPS), self.limits.block_size
        for s in self.policy.running:
            entries = len(s.blocks) // len(self.limits.windows)
            needed = -(-min(len(s.tokens) - 1 + steps * s.row_tokens, s.last_position) // size)
            reached = -(-(s.num_computed_tokens + steps * self.limits.budget) // size)
            in_progress = s.id in self.policy.sequences.prefills
            if in_progress and reached * size < len(s.tokens):
                assert entries <= reached, "a prompt holds blocks that no step ahead fills"
            assert entries <= needed
            if in_progress and not any(self.limits.windows):
                assert entries * len(self.limits.windows) + s.num_reserved_blocks == needed * len(self.limits.windows)
            for window, first in zip(filter(None, self.limits.windows), s.given_back, strict=True):
                assert entries - first <= self.limits.entries_of(window)

    @invariant()
    def a_prompt_in_progress_never_waits_for_blocks(self) -> None:
        assert self.policy.pool.num_free >= 0, "a reserved block was given away"
        for s in self.policy.sequences.prefills.values():
            held = len(s.blocks) // len(self.limits.windows) * self.limits.block_size
            assert s.num_computed_tokens < held or held >= len(s.tokens) or s.num_reserved_blocks

    def assert_admissions(self, plan: Plan, prompts: list[Sequence]) -> None:
        """Reserved blocks: a prompt joins those in progress only where it will soon be reached."""
        left = [(s.priority, len(s.tokens) - s.num_computed_tokens) for s in prompts]
        for added in plan.added:
            joined = self.policy.sequences.by_id[added.sequence]
            own = joined.priority, len(joined.tokens)
            before = sum(tokens for priority, tokens in left if (priority, tokens) <= own)
            assert before < STEPS_AHEAD * self.limits.budget
            left.append((joined.priority, len(joined.tokens) - joined.num_computed_tokens))

    @invariant()
    def nobody_is_passed_for_long(self) -> None:
        """Each prompt that is overdue goes first for a step, and an order takes effect within a window."""
        bound = PATIENCE + self.limits.max_running * (self.limits.window + 1)
        for s in self.policy.running:
            assert s.id not in self.policy.sequences.prefills or self.policy.num_steps - s.last_step <= bound

    @invariant()
    def the_executor_stays_within_lease_and_budget(self) -> None:
        assert self.executor.runs <= self.policy.lease_until <= self.policy.num_steps + self.limits.window
        assert self.executor.widest <= self.limits.budget

    def teardown(self) -> None:
        if not hasattr(self, "policy"):
            return
        still = 0
        for _ in range(100_000):  # the beams of many searches in a tiny pool are computed anew in every round
            self.plan()
            self.executor.plans.extend(self.executor.plans_in.catch_up())
            moved = self.executor.begin_step()
            while self.executor.outputs:
                self.executor.end_step()
            self.take(caught_up=True)
            self.books_balance()
            self.nobody_is_passed_for_long()
            still = 0 if moved else still + 1
            if still > 3:
                break
        assert not self.live, "sequences are stuck"
        assert not self.policy.num_unfinished
        assert self.policy.pool.num_free == self.limits.num_blocks, "blocks are lost"
        assert not self.executor.slots, "slots are lost"
        for completion in self.completions:
            got = completion.sequence.tokens[completion.sequence.num_prompt_tokens :]
            assert got == (completion.tokens[: len(got)] if completion.aborted else completion.tokens)


def check(examples: int, *, shrink: bool = True) -> None:
    phases = set(Phase) if shrink else {Phase.generate}
    run_state_machine_as_test(
        Scheduling,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            phases=tuple(phases),
            report_multiple_bugs=shrink,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_random_events_break_no_invariant() -> None:
    check(100)


@pytest.mark.full
def test_random_events_break_no_invariant_in_many_runs() -> None:
    check(2000)


def free_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that two sequences share is freed by the first."""
    free = BlockPool.free

    def faulty(self: BlockPool, blocks: list[int], *, apart: bool = False) -> None:
        free(self, blocks, apart=apart)
        if len(blocks) > 2:
            self._free[blocks[0]] = None

    monkeypatch.setattr(BlockPool, "free", faulty)


def free_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a live sequence are free with the next step that is read, though one in flight may write to them."""
    pop_answered = PendingFrees.pop_answered
    monkeypatch.setattr(PendingFrees, "pop_answered", lambda self, plan: pop_answered(self, 1 << 30))


def lose_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a long table is forgotten."""
    free = BlockPool.free
    monkeypatch.setattr(BlockPool, "free", lambda self, blocks, apart=False: free(self, blocks[:3], apart=apart))


def reserve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is admitted as if there were a block for each of its chunks."""
    monkeypatch.setattr(BlockPool, "num_free", property(lambda self: len(self._free)))


def keep_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is never free again after a preemption or an abort."""
    free = SequenceTable.free

    def faulty(self: SequenceTable, sequence: Sequence) -> None:
        lose = sequence.state in {SequenceState.PREEMPTED, SequenceState.ABORTED}
        free(self, sequence)
        if lose:
            self._free_slots.pop()

    monkeypatch.setattr(SequenceTable, "free", faulty)


def starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence in five never gets a slot."""
    in_order = WaitingQueue.in_order
    monkeypatch.setattr(WaitingQueue, "in_order", lambda self: (s for s in in_order(self) if s.id % 5))


def copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked sequence goes on in a block that nothing was copied to."""
    monkeypatch.setattr(beam_scheduler, "fork_blocks", lambda *arguments: (fork_blocks(*arguments)[0], []))


def share_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every child goes on in the last block of its parent."""

    def faulty(sequences: SequenceTable, pairs: list[tuple[Sequence, Sequence]], max_forks: int) -> object:
        apart = [fork_blocks(sequences, [pair], 1) for pair in pairs[:max_forks]]
        return [forked for forks, _ in apart for forked in forks], []

    monkeypatch.setattr(beam_scheduler, "fork_blocks", faulty)


def keep_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused beam keeps the blocks that the other beams need."""
    monkeypatch.setattr(BeamScheduler, "evict", lambda self, sequence: False)


@pytest.mark.parametrize(
    "plant",
    [
        free_twice,
        free_early,
        lose_block,
        reserve_nothing,
        keep_slot,
        starve,
        copy_nothing,
        share_too_much,
        keep_at_rest,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, KeyError)):
        check(800, shrink=False)
