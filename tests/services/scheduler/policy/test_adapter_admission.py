"""Sequences of few adapters run at a time, and no adapter starves another."""

import random

import pytest

from pagewire.services.scheduler.policy.adapter_admission import MAX_PASSED
from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from tests.services.scheduler.policy.test_policy import Engine, make_engine


def add(engine: Engine, adapter: str, length: int = 8, max_tokens: int = 8) -> Sequence:
    sequence = engine.add(list(range(length)), max_tokens)
    sequence.adapter, sequence.cache_salt = adapter, adapter
    return sequence


def running(engine: Engine) -> set[str]:
    return {sequence.adapter for sequence in engine.policy.running if sequence.adapter}


@pytest.mark.parametrize("most", [1, 2, 3])
def test_at_most_max_loras_run_at_a_time_and_all_end(most: int) -> None:
    engine, random_ = make_engine(max_loras=most), random.Random(most)
    for _ in range(40):
        add(engine, random_.choice(["", "a", "b", "c", "d"]), random_.randint(1, 20))
    seen = set()
    for _ in range(400):
        engine.plan()
        seen.add(len(running(engine)))
        assert len(running(engine)) <= most
        engine.executor.run()
        engine.read(99)
    assert max(seen) == most
    engine.drain()
    engine.assert_exact()


def test_plain_sequences_do_not_count() -> None:
    engine = make_engine(max_loras=1)
    first, *others = [add(engine, adapter, 2) for adapter in ("a", "", "", "b")]
    engine.plan()
    assert [sequence.state for sequence in (first, *others)] == [SequenceState.RUNNING] * 3 + [SequenceState.WAITING]


def test_the_oldest_adapters_run_first() -> None:
    engine = make_engine(max_loras=2)
    sequences = [add(engine, adapter, 2) for adapter in ("c", "a", "b", "a")]
    engine.plan()
    states = [sequence.state is SequenceState.RUNNING for sequence in sequences]
    assert states == [True, True, False, True]


def test_an_adapter_that_is_always_asked_for_starves_no_other() -> None:
    engine = make_engine(max_loras=1)
    add(engine, "a", 4, 12)
    other = add(engine, "b", 4, 12)
    for _ in range(2 * MAX_PASSED):
        if sum(sequence.adapter == "a" for sequence in engine.policy.waiting) < 2:
            add(engine, "a", 4, 12)
        engine.plan()
        engine.executor.run()
        engine.read(99)
        if other.state is SequenceState.FINISHED:
            break
    assert other.state is SequenceState.FINISHED
    engine.drain()


def test_prefixes_of_two_adapters_share_no_block() -> None:
    engine = make_engine(max_loras=2)
    add(engine, "a", 12)
    engine.drain()
    same, other = add(engine, "a", 12), add(engine, "b", 12)
    engine.plan()
    assert same.num_cached_tokens == 8
    assert other.num_cached_tokens == 0
