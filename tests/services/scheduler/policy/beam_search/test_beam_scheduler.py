"""The policy with beam searches: forks at exact positions, room for beams, and no search that waits for another."""

import pytest

from pagewire.services.scheduler.policy.beam_search.beam_scheduler import FIRST_BEAM
from pagewire.services.scheduler.policy.beam_search.ranking import BeamSearch
from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from pagewire.shared.messages.work import Sampling
from tests.support.beam import run_search
from tests.support.executor import ModelExecutor, generate, next_logprobs


class Engine:
    """The policy and an executor side by side."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, slots: int = 8, window: int = 2) -> None:
        self.policy = Policy(1, TermLimits(num_blocks, block_size, slots, 16, window, max_candidates=32))
        self.executor = ModelExecutor(num_blocks, block_size)
        self.plans: list[Plan] = []
        self.results: dict[int, list[Sequence]] = {}
        self.expired: list[int] = []
        self.now = 0.0
        self.ids = 0

    def sequence(self, prompt: list[int], sampling: Sampling, **fields: float) -> Sequence:
        self.ids += 1
        return Sequence(self.ids, list(prompt), len(prompt), sampling, arrival_order=self.ids, **fields)  # type: ignore[arg-type]

    def add(self, prompt: list[int], max_tokens: int = 8) -> Sequence:
        added = self.sequence(prompt, Sampling(max_tokens))
        self.policy.add(added)
        return added

    def search(
        self,
        prompt: list[int],
        width: int,
        max_tokens: int = 8,
        n: int = 1,
        stop_ids: tuple[int, ...] = (),
        **fields: float,
    ) -> int:
        """Begins a search; returns its id."""
        sampling = Sampling(max_tokens, stop_ids=pack(stop_ids), beam_width=width, candidates=width + len(stop_ids))
        choices = [self.sequence(prompt, sampling, **fields) for _ in range(n)]
        self.policy.beam_search.add(choices)
        return choices[0].id

    def step(self) -> bool:
        """Exchanges plans and steps once; returns whether the executor did anything."""
        while self.plan():
            pass
        self.policy.sequences.check()
        moved = self.executor.run()
        while self.executor.outputs:
            self.policy.on_step(self.executor.outputs.popleft())
            self.policy.sequences.check()
        return moved

    def plan(self) -> bool:
        """Sends the next plan; returns whether there was one."""
        plan, _, expired, searches = self.policy.schedule(self.now, None)
        self.expired += expired
        self.results |= {search.choices[0].id: list(search.choices) for search in searches}
        if plan is not None:
            self.plans.append(plan)
            self.executor.plans.append(plan)
        return plan is not None

    def drain(self) -> None:
        for _ in range(5000):
            if not self.step() and not self.policy.num_unfinished:
                break
        assert not self.policy.num_unfinished
        assert not self.policy.beam_search
        assert not self.policy.waiting.front
        assert self.policy.pool.num_free == self.policy.limits.num_blocks
        assert not self.executor.slots

    def assert_found(
        self, search: int, prompt: list[int], width: int, max_tokens: int = 8, stop_ids: tuple[int, ...] = ()
    ) -> None:
        count = width + len(stop_ids)
        expected = run_search(BeamSearch(width, max_tokens, 1.0, stop_ids), prompt, count, next_logprobs)
        choices = self.results[search]
        for choice, hypothesis in zip(choices, expected, strict=False):
            assert choice.tokens[choice.num_prompt_tokens :] == hypothesis.tokens
            assert choice.finish == hypothesis.finish


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_a_search_has_the_result_that_it_has_alone(window: int, width: int, length: int) -> None:
    engine = Engine(window=window)
    prompt = list(range(length))
    search = engine.search(prompt, width, n=width, stop_ids=(1, 2, 3))
    engine.drain()
    engine.assert_found(search, prompt, width, stop_ids=(1, 2, 3))
    assert engine.policy.preemptions == 0


def test_a_search_that_has_failed_is_returned_though_nothing_runs_any_more() -> None:
    engine = Engine(window=8)
    search = engine.search([1, 2, 3], 2)
    engine.step()
    beam = next(iter(engine.policy.sequences.by_id.values()))
    beam.finish = Finish.NOT_FINITE
    engine.policy.beam_search.fail(beam)
    assert not engine.policy.beam_search
    assert not engine.policy.beam_search.is_idle
    assert not engine.policy.is_settled
    engine.plan()
    assert [choice.finish for choice in engine.results[search]] == [Finish.NOT_FINITE]
    assert engine.policy.beam_search.is_idle


def test_a_search_whose_adapter_is_lost_ends() -> None:
    engine = Engine(window=8)
    search = engine.search([1, 2, 3], 2)
    engine.plan()
    beam = next(iter(engine.policy.sequences.by_id.values()))
    row = (pack([beam.id]), pack([0]), pack([0]), pack([NO_TOKEN]), bytes([Finish.ADAPTER_LOST]))
    engine.policy.on_step(StepOutput(engine.policy.term, 0, 0, *row, 0))
    engine.plan()
    assert [choice.finish for choice in engine.results[search]] == [Finish.ADAPTER_LOST]


def test_beams_stand_at_their_limit_until_the_last_one_has_reported() -> None:
    engine = Engine(window=8)
    engine.search([1, 2, 3], 3, max_tokens=6)
    steps = 0
    while engine.step():
        sequences = [slot for slot in engine.executor.slots.values() if slot.candidates]
        assert all(slot.computed <= slot.limit < len(slot.tokens) + 1 for slot in sequences)
        steps += 1
    assert engine.executor.runs == 6, "each round is one step, however long the lease"


def test_a_round_forks_the_winners_within_the_slots_and_removes_the_rest() -> None:
    engine = Engine(slots=4)
    engine.search([1, 2, 3, 4, 5], 4, max_tokens=8)
    engine.drain()
    rounds = [plan for plan in engine.plans if plan.forks]
    assert len(rounds) == 7
    assert all(len(plan.forks) == 4 for plan in rounds)
    assert all(len(unpack(plan.removed)) == 4 for plan in rounds[1:])
    for number, plan in enumerate(rounds):
        assert {fork.computed for fork in plan.forks} == {5 + number}
        assert {fork.limit for fork in plan.forks} == {6 + number}
        assert all(len(unpack(fork.tokens)) == 1 for fork in plan.forks)
        assert all(fork.sequence > FIRST_BEAM for fork in plan.forks)


def test_full_blocks_are_shared_and_only_partial_ones_are_copied() -> None:
    engine = Engine(block_size=4)
    engine.search([7] * 8, 3, max_tokens=3)
    engine.drain()
    first, second = (plan for plan in engine.plans if plan.forks)
    tables = [unpack(fork.blocks) for fork in first.forks]
    assert first.copies == b""  # the prompt fills its blocks
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    parents = [fork.source for fork in second.forks]
    assert len(unpack(second.copies)) == 2 * (len(parents) - len(set(parents)))


def test_a_lone_search_ends_in_a_pool_that_holds_one_of_its_beams() -> None:
    """The others are computed anew in each round: slow, but to the end."""
    engine = Engine(num_blocks=4, block_size=4)
    search = engine.search([1, 2, 3, 4, 5, 6], 4, max_tokens=8)
    engine.drain()
    engine.assert_found(search, [1, 2, 3, 4, 5, 6], 4)


def test_a_lone_search_ends_with_one_slot() -> None:
    engine = Engine(slots=1)
    search = engine.search([1, 2, 3], 3, max_tokens=5)
    engine.drain()
    engine.assert_found(search, [1, 2, 3], 3, max_tokens=5)


@pytest.mark.parametrize("blocks", [6, 8, 12])
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_searches_and_others_do_not_wait_for_each_other(blocks: int, slots: int) -> None:
    engine = Engine(num_blocks=blocks, slots=slots)
    prompts = [[i, i + 1, i + 2, 4, 5] for i in range(3)]
    searches = [engine.search(prompt, 3, max_tokens=7) for prompt in prompts]
    others = [engine.add([9, i], max_tokens=9) for i in range(3)]
    engine.drain()
    for search, prompt in zip(searches, prompts, strict=True):
        engine.assert_found(search, prompt, 3, max_tokens=7)
    for i, other in enumerate(others):
        assert other.tokens[2:] == generate([9, i], 9, [])


@pytest.mark.parametrize("steps", range(12))
def test_a_search_may_be_aborted_at_any_moment(steps: int) -> None:
    engine = Engine(num_blocks=8, slots=3)
    search = engine.search([1, 2, 3, 4, 5], 4, max_tokens=8)
    other = engine.add([9, 9], max_tokens=6)
    for _ in range(steps):
        engine.step()
    assert engine.policy.abort(search) == (search not in engine.results)
    assert not engine.policy.abort(search)
    engine.policy.sequences.check()
    engine.drain()
    assert other.tokens[2:] == generate([9, 9], 6, [])


def test_a_search_that_waits_past_its_deadline_ends_with_all_its_choices() -> None:
    engine = Engine(slots=2)
    search = engine.search([1, 2, 3], 2, max_tokens=9, n=2, deadline=5.0)
    late = engine.search([4, 5, 6], 4, max_tokens=9, n=3, deadline=5.0)
    for _ in range(4):
        engine.step()
    engine.now = 6.0
    engine.drain()
    assert set(range(late, late + 3)) <= set(engine.expired)
    assert search in engine.results or search in engine.expired


def test_the_caller_knows_a_beam_by_the_choices_of_its_search() -> None:
    engine = Engine()
    search = engine.search([1, 2, 3], 2)
    other = engine.add([1], max_tokens=3)
    engine.step()
    (beam, single) = sorted(engine.policy.running, key=lambda s: s.arrival_order)
    assert beam.id > FIRST_BEAM
    assert beam.caller_ids == (search,)
    assert single is other
    assert single.caller_ids == (other.id,)


def test_the_tokens_sampled_for_a_beam_do_not_end_it() -> None:
    """Neither its stop ids nor its length are the device's to judge."""
    engine = Engine()
    search = engine.search([1, 2, 3], 3, max_tokens=5, stop_ids=tuple(range(25)))
    engine.drain()
    added = engine.plans[0].added[0]
    assert added.sampling.stop_ids == b""
    assert added.sampling.max_tokens == 6
    assert {choice.finish for choice in engine.results[search]} <= {Finish.STOP, Finish.LENGTH}
    assert NO_TOKEN not in engine.results[search][0].tokens
