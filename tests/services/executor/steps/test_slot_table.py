"""The slot table against a plain model of it, and plans that it must refuse."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagewire.services.executor.steps.in_flight_step import InFlightStep, OutputColumns
from pagewire.services.executor.steps.plan_checks import PlanViolation
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.step import NO_TOKEN, Finish
from pagewire.shared.messages.work import Sampling
from tests.services.executor.fakes import CAPACITY, add, plan, running, sampling, token_at

BLOCK = CAPACITY.block_size
TABLE = -(-CAPACITY.max_model_len // BLOCK)


@dataclass
class Sequence:
    """One sequence as the model of the table has it."""

    seed: int
    tokens: list[int]
    computed: int
    limit: int
    blocks: int
    end: int
    stop_ids: list[int]
    finish: Finish = Finish.NONE
    written: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def runnable(self) -> bool:
        return self.finish == Finish.NONE and self.computed < self.limit


class Machine(RuleBasedStateMachine):
    """Random plans and steps. The model is written row by row, the table column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(CAPACITY)
        self.model: dict[int, Sequence] = {}
        self.order: list[int] = []
        self.budget = 1
        self.plans = 0
        self.sequences = 0
        self.dead: set[int] = set()

    def apply(self, **delta: object) -> None:
        self.plans += 1
        added = delta.pop("added", ())
        self.table.apply(plan(self.plans, *added, budget=self.budget, **delta))  # type: ignore[arg-type,misc]

    @precondition(lambda self: len(self.model) < CAPACITY.max_num_seqs)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([s for s in range(CAPACITY.max_num_seqs) if s not in self.model]))
        self.sequences += 1
        tokens = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=30))
        prompt_tokens = data.draw(st.integers(1, len(tokens)))
        computed = data.draw(st.integers(0, len(tokens) - 1))
        blocks = data.draw(st.integers(-(-computed // BLOCK), TABLE))
        limit = data.draw(st.integers(0, min(blocks * BLOCK, CAPACITY.max_model_len)))
        most = data.draw(st.integers(len(tokens) - prompt_tokens + 1, 30))
        stop_ids = data.draw(st.lists(st.integers(0, 49), max_size=6))
        picks = sampling(self.sequences, max_tokens=most, stop_ids=stop_ids)
        self.model[slot] = Sequence(
            seed=self.sequences,
            tokens=tokens,
            computed=computed,
            limit=limit,
            blocks=blocks,
            end=prompt_tokens + most,
            stop_ids=stop_ids,
        )
        self.order.append(slot)
        added = add(
            slot,
            self.sequences,
            tokens,
            range(blocks),
            limit=limit,
            computed=computed,
            prompt_tokens=prompt_tokens,
            picks=picks,
        )
        self.apply(added=(added,))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.order))
        self.order.remove(slot)
        del self.model[slot]
        self.apply(removed=[slot])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.order))
        sequence = self.model[slot]
        count = data.draw(st.integers(0, TABLE - sequence.blocks))
        sequence.blocks += count
        sequence.limit = data.draw(st.integers(0, sequence.blocks * BLOCK))
        self.apply(blocks=[(slot, block) for block in range(count)], limits=[(slot, sequence.limit)])

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        named = data.draw(st.lists(st.sampled_from(self.order), unique=True)) if self.order else []
        self.order = named + [slot for slot in self.order if slot not in named]
        self.apply(order=named)

    @rule(budget=st.integers(1, 24))
    def rebudget(self, budget: int) -> None:
        self.budget = budget
        self.apply()

    @rule()
    def step(self) -> None:
        expected = self.expect() if self.plans else []
        step = self.table.launch()
        if step is None:
            assert not expected
            return
        batch = step.batch
        assert list(zip(batch.slots.tolist(), batch.query_lens.tolist(), strict=True)) == expected
        tokens = np.full(len(expected), -1)
        inputs: list[int] = []
        for row, (slot, width) in enumerate(expected):
            sequence = self.model[slot]
            assert batch.num_computed_tokens[row] == sequence.computed
            inputs += sequence.tokens[sequence.computed : sequence.computed + width]
            assert batch.samples[row] == (width == sequence.remaining)
            if batch.samples[row]:
                tokens[row] = token_at(sequence.seed, len(sequence.tokens))
        assert batch.token_ids.tolist() == inputs
        self.check(self.table.record(step, tokens), expected, tokens.tolist())

    def expect(self) -> list[tuple[int, int]]:
        """Dynamic SplitFuse, row by row."""
        runnable = [(slot, self.model[slot]) for slot in self.order if self.model[slot].runnable]
        rows = [(slot, 1) for slot, sequence in runnable if sequence.remaining == 1][: self.budget]
        left = self.budget - len(rows)
        for slot, sequence in runnable:
            if sequence.remaining > 1 and left:
                limit = min(sequence.limit, CAPACITY.max_model_len)
                width = min(sequence.remaining, limit - sequence.computed, left)
                rows.append((slot, width))
                left -= width
        return rows

    def check(self, columns: OutputColumns, rows: list[tuple[int, int]], tokens: list[int]) -> None:
        finishes: list[int] = []
        for (slot, width), token, start in zip(rows, tokens, unpack(columns.starts), strict=True):
            sequence = self.model[slot]
            assert start == sequence.computed
            sequence.computed += width
            if token >= 0:
                sequence.tokens.append(token)
                if token in sequence.stop_ids:
                    sequence.finish = Finish.STOP
                elif len(sequence.tokens) == sequence.end:
                    sequence.finish = Finish.LENGTH
            finishes.append(sequence.finish)
        assert unpack(columns.sequences) == [self.model[slot].seed for slot, _ in rows]
        assert unpack(columns.counts) == [width for _, width in rows]
        assert unpack(columns.tokens) == [NO_TOKEN if token < 0 else token for token in tokens]
        assert list(columns.finishes) == finishes

    @invariant()
    def pending_is_what_is_unfinished(self) -> None:
        slots, remaining, room = self.table.pending()
        live = [slot for slot in self.order if self.model[slot].finish == Finish.NONE]
        assert slots.tolist() == live
        assert remaining.tolist() == [self.model[slot].remaining for slot in live]
        limits = [min(self.model[slot].limit, CAPACITY.max_model_len) for slot in live]
        assert room.tolist() == [limit - self.model[slot].computed for slot, limit in zip(live, limits, strict=True)]
        assert self.table.has_work == bool(live)


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAgainstTheModel = Machine.TestCase


def test_a_sequence_is_computed_whole_and_dense() -> None:
    table = running(add(2, 9, range(10), [4, 5, 6, 7], picks=sampling(9, max_tokens=5)))
    table.apply(plan(2, budget=4))
    seen: list[tuple[int, int]] = []
    while (step := table.launch()) is not None:
        columns = table.record(step, np.where(step.batch.samples, 7, -1))
        seen.append((unpack(columns.starts)[0], unpack(columns.counts)[0]))
    assert seen == [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1), (12, 1), (13, 1)]
    assert list(columns.finishes) == [Finish.LENGTH]


def launched(table: SlotTable) -> InFlightStep:
    step = table.launch()
    assert step is not None
    return step


def test_a_sampled_token_is_the_next_input() -> None:
    table = running(add(0, 1, [3, 4], [0]))
    table.record(launched(table), np.array([42]))
    following = launched(table).batch
    assert following.token_ids.tolist() == [42]
    assert following.num_computed_tokens.tolist() == [2]


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_known() -> None:
    table = running(add(0, 1, [3, 4], [0], picks=sampling(max_tokens=3)))
    steps = [launched(table), launched(table), launched(table)]
    assert [step.batch.num_computed_tokens.tolist() for step in steps] == [[0], [2], [3]]
    assert table.launch() is None, "the length is known ahead"
    columns = [table.record(step, np.array([token])) for step, token in zip(steps, (7, 8, 9), strict=True)]
    assert [unpack(each.tokens) for each in columns] == [[7], [8], [9]]
    assert [list(each.finishes) for each in columns] == [[Finish.NONE], [Finish.NONE], [Finish.LENGTH]]


def test_rows_behind_a_stop_id_are_dead() -> None:
    table = running(add(0, 1, [3], [0], picks=sampling(stop_ids=[5])), add(1, 2, [4], [1]))
    steps = [launched(table), launched(table), launched(table)]
    assert list(table.record(steps[0], np.array([5, 6])).finishes) == [Finish.STOP, Finish.NONE]
    table.apply(plan(2, add(0, 3, [9], [0]), removed=[0]))  # the slot goes to another at once
    for step in steps[1:]:
        columns = table.record(step, np.array([5, 7]))
        assert (unpack(columns.sequences), unpack(columns.tokens)) == ([2], [7])
    following = launched(table).batch
    assert (following.slots.tolist(), following.token_ids.tolist()) == ([1, 0], [7, 9])


def test_a_row_of_a_removed_sequence_is_reported_and_leaves_the_next_one_alone() -> None:
    table = running(add(0, 1, [3], [0], picks=sampling(stop_ids=[5])))
    steps = [launched(table), launched(table)]
    table.apply(plan(2, add(0, 2, [8, 9, 8], [0], picks=sampling(stop_ids=[6])), removed=[0]))
    columns = [table.record(step, np.array([token])) for step, token in zip(steps, (6, 5), strict=True)]
    assert [unpack(each.sequences) for each in columns] == [[1], [1]]
    assert [list(each.finishes) for each in columns] == [[Finish.NONE], [Finish.STOP]]
    assert launched(table).batch.token_ids.tolist() == [8, 9, 8]
    assert table.has_work


def test_a_finished_slot_waits_for_its_removal() -> None:
    table = running(add(0, 1, [3], [0], picks=sampling(max_tokens=1)))
    table.record(launched(table), np.array([5]))
    assert table.launch() is None
    assert not table.has_work
    with pytest.raises(PlanViolation):
        table.apply(plan(2, add(0, 2, [3], [0])))


def test_a_stop_id_wins_over_the_length() -> None:
    table = running(add(0, 1, [3], [0], picks=sampling(max_tokens=1, stop_ids=[5])))
    assert list(table.record(launched(table), np.array([5])).finishes) == [Finish.STOP]


def test_slot_and_blocks_are_reused_within_one_plan() -> None:
    table = running(add(0, 1, [3], [0]), add(1, 2, [4], [1]))
    table.apply(plan(2, add(0, 3, [7, 8], [0]), removed=[0]))
    slots, remaining, _ = table.pending()
    assert slots.tolist() == [1, 0]  # the newcomer is the last
    assert remaining.tolist() == [1, 2]


def test_a_limit_below_the_computed_positions_stops_the_slot() -> None:
    table = running(add(0, 1, range(6), [0, 1], computed=5))
    table.apply(plan(2, limits=[(0, 3)]))
    assert table.launch() is None
    assert table.has_work


def test_a_cleared_table_has_every_slot_free() -> None:
    table = running(add(0, 1, [3], [0]), add(1, 2, [4], [1]))
    table.clear()
    assert table.launch() is None
    table.apply(plan(1, add(0, 3, [3], [0])))
    assert table.pending().slots.tolist() == [0]


@pytest.mark.parametrize(
    "broken",
    [
        plan(2, removed=[1]),
        plan(2, removed=[99]),
        plan(2, add(4, 2, [1], [1])),
        plan(2, add(0, 2, [1], [1])),
        plan(2, add(1, 2, [], [1])),
        plan(2, add(1, 2, [1], [1], prompt_tokens=0)),
        plan(2, add(1, 2, [1], [1], prompt_tokens=2)),
        plan(2, add(1, 2, [50], [1])),
        plan(2, add(1, 2, [1] * 41, range(10), limit=40)),
        plan(2, add(1, 2, [1, 2], [1], computed=2)),
        plan(2, add(1, 2, [1] * 8, [1], computed=5)),
        plan(2, add(1, 2, [1, 2, 3], [1], prompt_tokens=1, picks=sampling(max_tokens=2))),
        plan(2, add(1, 2, [1], [1], picks=Sampling(8, b"of another layout"))),
        plan(2, add(1, 2, [1], [1], picks=sampling(stop_ids=[50]))),
        plan(2, add(1, 2, [1], [32])),
        plan(2, add(1, 2, [1], [1], limit=5)),
        plan(2, add(1, 2, [1], range(11))),
        plan(2, blocks=[(1, 0)]),
        plan(2, blocks=[(0, 32)]),
        plan(2, limits=[(0, 5)]),
        plan(2, limits=[(1, 0)]),
        plan(2, order=[0, 0]),
        plan(2, order=[3]),
        plan(2, budget=0),
    ],
)
def test_a_plan_that_contradicts_the_table_is_refused(broken: Plan) -> None:
    table = running(add(0, 1, [3], [0]))
    with pytest.raises(PlanViolation):
        table.apply(broken)


@pytest.mark.parametrize("cut", [b"\x01", pack([0])])
def test_a_cut_column_is_refused(cut: bytes) -> None:
    table = running(add(0, 1, [3], [0]))
    with pytest.raises(PlanViolation, match="cut off"):
        table.apply(
            Plan(
                term=1,
                number=2,
                removed=b"",
                added=(),
                blocks=cut,
                limits=b"",
                order=b"",
                budget=1,
                lease_until=9,
            )
        )


def test_forced_tokens_come_behind_the_sampled_one_and_before_prompts() -> None:
    table = running(add(0, 1, [3], [0, 1]), add(1, 2, [4], [2]), add(2, 3, range(12), [3, 4, 5, 6]))
    table.apply(plan(2, order=[2], budget=4))
    step, forced = launched(table), {0: [20, 21]}
    assert step.batch.slots.tolist() == [0, 1, 2]
    table.append_forced(step, forced)
    columns = table.record(step, np.array([7, 8, -1]), forced=forced)
    assert (unpack(columns.tokens), unpack(columns.token_counts)) == ([7, 20, 21, 8], [3, 1, 0])
    following = launched(table).batch
    assert following.slots.tolist() == [1, 0, 2]
    assert following.query_lens.tolist() == [1, 2, 1], "one position more, and what the budget leaves for the prompt"
    assert following.token_ids[:3].tolist() == [8, 7, 20]
    assert following.samples.tolist() == [True, False, False]
    last = launched(table).batch
    assert (last.slots.tolist(), last.query_lens.tolist()) == ([0, 1, 2], [1, 1, 2])
    assert last.samples.tolist() == [True, True, False]


def test_forced_tokens_do_not_wait_for_rows_that_have_a_grammar() -> None:
    table = running(add(0, 1, [3], [0, 1]), add(1, 2, [4], [2, 3]))
    for slot in (0, 1):
        table.hold(slot, structured=True)
        table.release(slot)
    step = launched(table)
    table.append_forced(step, {0: [20, 21, 22]})
    table.record(step, np.array([7, 8]), forced={0: [20, 21, 22]})
    batch = launched(table).batch
    assert (batch.slots.tolist(), batch.query_lens.tolist()) == ([1, 0], [1, 4])


def test_forced_tokens_are_launched_before_the_token_in_front_is_known() -> None:
    table = running(add(0, 1, [3], [0, 1]))
    first, forced = launched(table), {0: [20, 21]}
    table.append_forced(first, forced)
    second = launched(table)
    assert (second.batch.num_computed_tokens.tolist(), second.batch.query_lens.tolist()) == ([1], [3])
    assert second.batch.token_ids[1:].tolist() == [20, 21]
    assert unpack(table.record(first, np.array([7]), forced=forced).tokens) == [7, 20, 21]
    columns = table.record(second, np.array([9]))
    assert (unpack(columns.starts), unpack(columns.counts), unpack(columns.tokens)) == ([1], [3], [9])


def test_nothing_is_forced_behind_the_end() -> None:
    table = running(add(0, 1, [3], [0, 1], picks=sampling(stop_ids=[7])), add(1, 2, [4], [2]))
    step, forced = launched(table), {0: [20, 21]}
    table.append_forced(step, forced)
    columns = table.record(step, np.array([7, 8]), forced=forced)
    assert (unpack(columns.tokens), list(columns.finishes)) == ([7, 8], [Finish.STOP, Finish.NONE])
    assert launched(table).batch.slots.tolist() == [1]
