"""The step loop on its thread: leases, boundaries, answers, terms, counters."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from pagewire.services.executor.outputs.results import PlanRefused
from pagewire.services.executor.sequence_key import sequence_key
from pagewire.services.executor.steps.sampling_settings import sampling_record
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.shared.errors import DeviceLost
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import Fork
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from pagewire.shared.sampling_parameters import record
from tests.services.executor.fakes import PATIENCE, Run, add, plan, sampling, token_at


@pytest.fixture(params=[1, 2])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """The loop's results are equal however many steps are in flight."""
    started = Run(depth=request.param)
    yield started
    started.finish()


@pytest.fixture
def gated() -> Iterator[Run]:
    started = Run(gated=True)
    yield started
    started.device.allow(1000)
    started.finish()


@pytest.fixture
def ahead() -> Iterator[Run]:
    started = Run(depth=2, gated=True)
    yield started
    started.device.allow(1000)
    started.finish()


def key(sequence: int) -> int:
    return sequence_key(sequence, 0, 0)


def test_the_loop_runs_as_far_as_the_lease_and_no_further(run: Run) -> None:
    run.inbox.put(plan(1, add(0, 7, [1, 2, 3], range(10), picks=sampling(7, max_tokens=30)), lease_until=3))
    outputs = [run.output() for _ in range(3)]
    run.inbox.put(plan(2, lease_until=5))
    outputs += [run.output() for _ in range(2)]
    assert [output.step for output in outputs] == [0, 1, 2, 3, 4]
    assert [output.plan for output in outputs] == [1, 1, 1, 2, 2]
    assert [unpack(output.sequences) for output in outputs] == [[7]] * 5
    assert [unpack(output.starts)[0] for output in outputs] == [0, 3, 4, 5, 6]
    assert [unpack(output.counts)[0] for output in outputs] == [3, 1, 1, 1, 1]
    assert [unpack(output.tokens)[0] for output in outputs] == [token_at(key(7), at) for at in range(3, 8)]
    run.finish()
    assert run.results.empty()


def test_steps_and_their_tokens_do_not_depend_on_the_lease(run: Run) -> None:
    """Window 1 and window 8 are one code path."""
    tokens: dict[int, list[int]] = {}
    for term, window in ((2, 1), (3, 8)):
        run.inbox.begin(term)
        admitted = add(0, 7, [1, 2, 3], range(10), picks=sampling(7, max_tokens=9))
        run.inbox.put(plan(1, admitted, term=term, lease_until=window))
        number, sampled = 1, tokens.setdefault(window, [])
        while True:
            output = run.output()
            sampled += unpack(output.tokens)
            if any(output.finishes):
                break
            number += 1
            run.inbox.put(plan(number, term=term, lease_until=output.step + 1 + window))
    assert tokens[1] == tokens[8]
    assert len(tokens[1]) == 9


def test_a_plan_takes_effect_at_the_next_boundary(gated: Run) -> None:
    gated.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30))))
    gated.entered()
    gated.inbox.put(plan(2, add(1, 8, [4, 5], range(10, 20))))
    gated.device.allow()
    running = gated.output()
    assert (running.plan, unpack(running.sequences)) == (1, [7])
    gated.device.allow()
    following = gated.output()
    assert (following.plan, unpack(following.sequences)) == (2, [7, 8])


def test_all_plans_that_have_come_are_applied_at_one_boundary(gated: Run) -> None:
    gated.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30))))
    gated.entered()
    for number in (3, 4, 2):
        gated.inbox.put(plan(number))
    gated.device.allow(2)
    assert gated.output().plan == 1
    together = gated.result()
    assert together.output.plan == 4
    assert [each.number for each in together.plans] == [2, 3, 4]


def test_a_plan_that_no_step_follows_is_answered(run: Run) -> None:
    run.inbox.put(plan(1))
    assert run.output() == StepOutput(1, 0, 1, b"", b"", b"", b"", b"", 0)
    run.inbox.put(plan(2, add(0, 7, [1, 2], [0], limit=1)))
    assert unpack(run.output().tokens) == [NO_TOKEN]
    run.inbox.put(plan(3, removed=[0]))  # the last runnable slot goes
    answer = run.output()
    assert (answer.step, answer.plan, answer.sequences) == (2, 3, b"")


def test_answers_take_a_number_and_no_step_of_the_lease(run: Run) -> None:
    run.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30)), lease_until=1))
    assert unpack(run.output().sequences) == [7]
    for number in (2, 3):
        run.inbox.put(plan(number, lease_until=1))
        answer = run.output()
        assert (answer.step, answer.plan, answer.sequences) == (number - 1, number, b"")
    run.inbox.put(plan(4, lease_until=2))  # one step more, whatever its number is
    step = run.output()
    assert (step.step, step.plan, unpack(step.sequences)) == (3, 4, [7])
    run.inbox.put(plan(5, lease_until=2))
    assert run.output().sequences == b""


def test_no_plan_is_applied_across_a_gap(run: Run) -> None:
    run.inbox.put(plan(3, removed=[0], lease_until=0))
    run.inbox.put(plan(1, lease_until=0))
    assert run.output().plan == 1
    run.inbox.put(plan(2, add(0, 7, [1], [0]), lease_until=0))
    repaired = run.result()
    assert [each.number for each in repaired.plans] == [2, 3]
    assert (repaired.output.step, repaired.output.plan) == (1, 3)


def test_a_slot_at_its_limit_delays_no_other_slot(run: Run) -> None:
    short = add(0, 7, [1], [0], limit=2, picks=sampling(7, max_tokens=30))
    run.inbox.put(plan(1, short, add(1, 8, [4], [1, 2], picks=sampling(8, max_tokens=6)), lease_until=4))
    assert [unpack(run.output().sequences) for _ in range(4)] == [[7, 8], [7, 8], [8], [8]]
    run.inbox.put(plan(2, blocks=[(0, 3)], limits=[(0, 8)], lease_until=5))
    output = run.output()
    assert unpack(output.sequences) == [7, 8]
    assert unpack(output.starts) == [2, 4]
    run.finish()
    assert run.device.tables[0] == [0, 3]


def test_a_finished_sequence_never_runs_again(run: Run) -> None:
    stop = token_at(key(8), 3)
    run.inbox.put(
        plan(
            1,
            add(0, 7, [1, 2], range(2), picks=sampling(7, max_tokens=2)),
            add(1, 8, [1, 2], range(2, 4), picks=sampling(8, max_tokens=6, stop_ids=[stop])),
        )
    )
    first, second = run.output(), run.output()
    assert list(first.finishes) == [Finish.NONE, Finish.NONE]
    assert list(second.finishes) == [Finish.LENGTH, Finish.STOP]
    run.inbox.put(plan(2))
    assert run.output().sequences == b""


def test_a_higher_term_empties_the_slots_and_starts_the_numbers_again(run: Run) -> None:
    run.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30)), lease_until=2))
    assert [run.output().step for _ in range(2)] == [0, 1]
    run.inbox.begin(5)
    run.inbox.put(plan(2, lease_until=9))  # of the old term
    run.inbox.put(plan(1, add(0, 1, [6], [0]), term=5, lease_until=1))
    output = run.output()
    assert (output.term, output.step, output.plan, unpack(output.sequences)) == (5, 0, 1, [1])


def test_a_higher_term_ends_the_old_one_at_the_next_boundary(gated: Run) -> None:
    gated.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30))))
    gated.entered()
    gated.inbox.begin(2)
    gated.device.allow()
    assert gated.output().term == 1
    gated.inbox.put(plan(1, term=2))
    answer = gated.output()
    assert (answer.term, answer.step, answer.sequences) == (2, 0, b"")
    assert gated.device.tables == {}


def test_the_next_step_is_launched_before_the_last_one_has_ended(ahead: Run) -> None:
    ahead.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30))))
    ahead.entered()
    for step in range(4):
        ahead.entered()
        assert len(ahead.device.batches) == step + 2
        ahead.device.allow()
        assert ahead.output().step == step


def test_an_output_names_the_plan_before_its_launch(ahead: Run) -> None:
    ahead.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30))))
    ahead.entered()
    ahead.entered()
    ahead.inbox.put(plan(2, removed=[0]))
    ahead.device.allow(2)
    outputs = [ahead.output() for _ in range(3)]
    assert [output.plan for output in outputs] == [1, 1, 2]
    assert [unpack(output.sequences) for output in outputs] == [[7], [7], []]
    assert [output.step for output in outputs] == [0, 1, 2]


def test_a_step_of_dead_rows_is_not_counted(run: Run) -> None:
    stop = token_at(key(7), 2)
    run.inbox.put(plan(1, add(0, 7, [1], [0, 1], picks=sampling(7, max_tokens=7, stop_ids=[stop])), lease_until=3))
    outputs = [run.output() for _ in range(2)]
    assert [list(output.finishes) for output in outputs] == [[Finish.NONE], [Finish.STOP]]
    run.inbox.put(plan(2, add(0, 8, [1], [0, 1], picks=sampling(8)), removed=[0], lease_until=3))
    output = run.output()  # one step of the lease is left
    assert (output.step, output.plan, unpack(output.sequences)) == (2, 2, [8])
    run.inbox.put(plan(3, lease_until=3))
    answer = run.output()
    assert (answer.step, answer.plan, answer.sequences) == (3, 3, b"")


def test_a_step_of_dead_rows_answers_its_plans(ahead: Run) -> None:
    stop = token_at(key(7), 2)
    ahead.inbox.put(plan(1, add(0, 7, [1], [0, 1], picks=sampling(7, max_tokens=7, stop_ids=[stop]))))
    ahead.entered()
    ahead.entered()
    ahead.inbox.put(plan(2))
    ahead.device.allow(3)
    assert [ahead.output().plan for _ in range(2)] == [1, 1]
    answer = ahead.result()
    assert [each.number for each in answer.plans] == [2]
    assert (answer.output.step, answer.output.plan, answer.output.sequences) == (2, 2, b"")


@pytest.mark.parametrize("refused", [False, True])
def test_steps_in_flight_when_a_term_ends_are_dropped(ahead: Run, refused: bool) -> None:
    ahead.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30))))
    ahead.entered()
    ahead.entered()
    if refused:
        ahead.inbox.put(plan(2, removed=[3]))
    else:
        ahead.inbox.begin(2)
    ahead.device.allow(2)
    assert ahead.output().step == 0
    if refused:
        assert isinstance(ahead.results.get(timeout=PATIENCE), PlanRefused)
        ahead.inbox.begin(2)
    ahead.inbox.put(plan(1, add(0, 8, [1], [0], picks=sampling(8, max_tokens=1)), term=2))
    ahead.device.allow()
    output = ahead.output()
    assert (output.term, output.step, unpack(output.sequences)) == (2, 0, [8])
    assert not ahead.device.pending


def test_closing_waits_for_the_steps_in_flight(ahead: Run) -> None:
    ahead.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30))))
    ahead.entered()
    ahead.entered()
    ahead.inbox.close()
    ahead.device.allow(2)
    assert [ahead.output().step for _ in range(2)] == [0, 1]
    ahead.ended.result(PATIENCE)
    assert not ahead.device.pending


def test_a_contradictory_plan_ends_the_term(run: Run) -> None:
    run.inbox.put(plan(1, add(0, 7, [1], [0]), lease_until=0))
    assert run.output().sequences == b""
    run.inbox.put(plan(2, add(1, 8, [1], [1]), removed=[0, 3]))
    refused = run.results.get(timeout=PATIENCE)
    assert isinstance(refused, PlanRefused)
    assert refused.term == 1
    assert "[0, 3]" in refused.reason
    assert run.device.tables == {}
    run.inbox.put(plan(3))  # not answered
    run.inbox.begin(2)
    run.inbox.put(plan(1, add(0, 9, [1], [0]), term=2))
    assert run.output().term == 2


def test_an_exception_of_the_device_ends_the_loop(gated: Run) -> None:
    gated.device.failing = True
    gated.inbox.put(plan(1, add(0, 7, [1], [0])))
    gated.device.allow()
    with pytest.raises(RuntimeError, match="on fire"):
        gated.ended.result(PATIENCE)
    failed = gated.output()
    assert (failed.step, unpack(failed.failed), failed.sequences) == (0, [7], b"")


@pytest.mark.parametrize("failing", [False, True])
def test_a_lost_device_ends_the_loop_and_no_sequence_is_named(gated: Run, failing: bool) -> None:
    gated.inbox.put(plan(1, add(0, 7, [1], [0])))
    gated.entered()
    gated.device.failing = failing
    gated.device.lose()
    gated.device.allow()
    with pytest.raises(DeviceLost, match="rank 1 has ended"):
        gated.ended.result(PATIENCE)
    assert gated.loop.broken
    assert gated.results.empty()


def test_a_device_that_is_lost_without_a_step_ends_the_loop(run: Run) -> None:
    run.device.lose()
    with pytest.raises(DeviceLost, match="rank 1 has ended"):
        run.ended.result(PATIENCE)
    assert run.loop.broken


def test_a_step_that_raises_names_its_sequences_and_a_higher_term_begins_anew(run: Run) -> None:
    run.device.recovers = True
    run.inbox.put(plan(1, add(0, 7, [1], [0], picks=sampling(7, max_tokens=1)), add(1, 8, [1], [1]), lease_until=1))
    assert not run.output().failed
    run.device.failing = True
    run.inbox.put(plan(2, add(2, 9, [1], [2])))
    failed = run.output()
    assert (failed.step, unpack(failed.failed), failed.sequences) == (1, [8, 9], b"")
    assert run.device.tables == {}
    run.device.failing = False
    run.inbox.put(plan(3))  # not answered
    run.inbox.begin(2)
    run.inbox.put(plan(1, add(0, 10, [1], [0]), term=2))
    assert unpack(run.output().sequences) == [10]


def test_a_sequence_that_cannot_be_added_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no")

    run.device.recovers = True
    monkeypatch.setattr(run.device, "add", refuse)
    run.inbox.put(plan(1, add(0, 7, [1], [0])))
    assert unpack(run.output().failed) == [7]


def test_a_sequence_that_cannot_be_added_is_named_and_none_that_runs(
    ahead: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    ahead.device.recovers = True
    ahead.inbox.put(plan(1, add(0, 7, [1], range(10), picks=sampling(7, max_tokens=30))))
    ahead.entered()
    monkeypatch.setattr(ahead.device, "add", refuse)
    ahead.inbox.put(plan(2, add(1, 8, [1], [10])))
    ahead.device.allow(1000)
    while not (output := ahead.output()).failed:
        assert unpack(output.sequences) == [7]
    assert unpack(output.failed) == [8]


def test_all_sequences_are_named_where_no_step_can_be_launched(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a model that drafts fails, before there is a step."""
    run.device.recovers = True
    monkeypatch.setattr(SlotTable, "launch", lambda _: 1 / 0)
    run.inbox.put(plan(1, add(0, 7, [1], [0]), add(1, 8, [1], [1])))
    assert unpack(run.output().failed) == [7, 8]
    assert not run.loop.broken


def test_counters_tell_steps_rows_and_tokens(run: Run) -> None:
    run.inbox.put(plan(1, add(0, 7, range(6), [0, 1], picks=sampling(7, max_tokens=2)), budget=4, lease_until=9))
    for _ in range(3):
        run.output()
    counters = run.loop.counters
    assert (counters.steps, counters.rows, counters.tokens, counters.sampled) == (3, 3, 7, 2)
    assert counters.busy_s == 1.5
    assert counters.num_slots == 1
    recent = list(run.loop.metrics.recent)
    assert [(step.number, step.rows) for step in recent] == [(1, 1), (2, 1), (3, 1)]
    assert recent[-1].lease_left == 6
    assert [(step.prompt_tokens, step.decode_tokens) for step in recent] == [(4, 0), (2, 0), (0, 1)]
    assert all(step.elapsed_us > 0 for step in recent)
    run.inbox.put(plan(2, removed=[0]))
    run.output()
    assert counters.num_slots == 0


def waited(run: Run, second: int) -> float:
    """Seconds that the loop counts as waiting before plan `second`."""
    before = run.loop.counters.waiting_s
    run.inbox.put(plan(second, lease_until=0))
    run.output()
    return run.loop.counters.waiting_s - before


def test_waiting_time_counts_only_while_there_is_work(run: Run) -> None:
    run.inbox.put(plan(1, lease_until=0))
    run.output()
    assert waited(run, 2) == 0
    run.inbox.put(plan(3, add(0, 7, [1], [0]), lease_until=0))  # work, but no lease
    run.output()
    assert waited(run, 4) > 0
    run.inbox.put(plan(5, removed=[0]))
    run.output()
    assert waited(run, 6) == 0


def test_a_step_that_takes_too_long_for_its_size_is_overdue(gated: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("pagewire.services.executor.steps.in_flight_steps.time.monotonic", lambda: now)
    gated.inbox.put(plan(1, add(0, 7, range(8), [0, 1]), lease_until=1))
    gated.entered()
    overdue = [gated.loop.overdue]
    for later in (20, 5):
        now += later
        overdue.append(gated.loop.overdue)
    gated.device.allow()
    gated.output()
    assert [*overdue, gated.loop.overdue] == [False, False, True, False]


def test_the_device_gets_the_sampling_parameters_of_each_sequence(run: Run) -> None:
    added = add(0, 7, [1, 2, 3, 4], [0, 1], prompt_tokens=3, picks=sampling(5, stop_ids=[2, 9]))
    expected = record(temperature=1.0, key=sequence_key(5, 0, 0), min_length=3)
    assert sampling_record(added) == expected
    run.inbox.put(plan(1, added))
    run.output()
    assert run.device.records[0] == expected
    assert run.device.stop_ids[0] == [2, 9]


def test_candidates_are_sent_for_the_sequences_that_ask_for_them(run: Run) -> None:
    asking = msgspec.structs.replace(sampling(7), candidates=2)
    run.inbox.put(plan(1, add(1, 9, [4], [1], picks=asking), add(0, 8, [1, 2], [0]), lease_until=1))
    output = run.output()
    assert set(unpack(output.sequences)) == {8, 9}
    assert unpack(output.candidate_counts) == [9, 2]
    first = token_at(key(7), 1)
    assert unpack(output.candidates) == [first, first + 1]
    assert np.frombuffer(output.logprobs, "<f4").tolist() == [0.0, -1.0]


def test_candidates_and_logprobs_are_sent_on_request_alone(run: Run) -> None:
    run.inbox.put(plan(1, add(0, 7, [1], [0]), lease_until=1))
    output = run.output()
    assert (output.candidate_counts, output.candidates, output.logprobs) == (b"", b"", b"")


def test_forks_inherit_the_sampling_of_their_source_after_its_blocks(run: Run) -> None:
    picks = sampling(7, max_tokens=30)
    run.inbox.put(plan(1, add(0, 7, [1, 2, 3, 4, 5], [0, 1], limit=5, picks=picks), lease_until=9))
    run.output()
    forks = (
        Fork(1, 8, 0, 5, pack([6]), pack([0, 1]), 6),
        Fork(0, 9, 0, 5, pack([7]), pack([0, 2]), 6),
    )
    delta = msgspec.structs.replace(plan(2, removed=[0], lease_until=9), forks=forks, copies=pack([1, 2]))
    run.inbox.put(delta)
    output = run.output()
    assert unpack(output.sequences) == [8, 9]
    assert unpack(output.starts) == [5, 5]
    assert unpack(output.tokens) == [token_at(key(7), 6)] * 2
    run.finish()
    assert run.device.copies == [(1, 2)]
    assert run.device.tables == {1: [0, 1], 0: [0, 2]}
    assert run.device.records[0] == run.device.records[1]
    assert run.device.stop_ids[0] == run.device.stop_ids[1]
    assert run.loop.counters.num_slots == 2


def test_a_fork_of_an_empty_slot_ends_the_term_before_the_device_sees_it(run: Run) -> None:
    broken = msgspec.structs.replace(
        plan(1), forks=(Fork(1, 8, 0, 5, pack([6]), pack([0, 1]), 6),), copies=pack([1, 2])
    )
    run.inbox.put(broken)
    assert isinstance(run.results.get(timeout=PATIENCE), PlanRefused)
    assert run.device.copies == []
    assert run.device.tables == {}
