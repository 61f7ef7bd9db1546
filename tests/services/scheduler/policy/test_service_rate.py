"""The rate of starts, against a simulation in which every slot generates at a constant speed."""

import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.scheduler.policy.service_rate import KNOWN_AFTER, RECENT, TAU, ServiceRate

STEP = 0.1
SLOTS = 16
SPEED = 20.0
"""Tokens per second of a slot."""


class Machine:
    """Slots that always take the next request of an endless queue, or a part of the slots for a light load."""

    def __init__(self, lengths: Iterator[int], slots: int = SLOTS, speed: float = SPEED, in_use: int | None = None):
        self.rate = ServiceRate(slots)
        self.speed = speed
        self.lengths = lengths
        self.in_use = slots if in_use is None else in_use
        self.slots: list[tuple[int, float]] = []
        """Length and generated tokens of each running request."""
        self.starts: deque[float] = deque()
        self.now = 0.0

    @property
    def generated(self) -> float:
        return sum(done for _, done in self.slots) / max(1, len(self.slots))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            while len(self.slots) < self.in_use:
                self.slots.append((next(self.lengths), 0.0))
                self.starts.append(self.now)
            self.now += STEP
            before = sum(done for _, done in self.slots)
            self.slots = [(length, min(float(length), done + self.speed * STEP)) for length, done in self.slots]
            tokens = sum(done for _, done in self.slots) - before
            waiting = self.in_use == SLOTS
            self.rate.observe(STEP, len(self.slots), round(tokens), waiting=waiting)
            for length, done in self.slots:
                if done >= length:
                    self.rate.end(length)
            self.slots = [(length, done) for length, done in self.slots if done < length]

    def estimate(self) -> float:
        return self.rate.starts_per_second(self.generated)


def lengths_of(choose: Callable[[random.Random], float]) -> Iterator[int]:
    chance = random.Random(1)
    while True:
        yield max(1, round(choose(chance)))


@pytest.mark.parametrize(
    "choose",
    [
        lambda chance: 100,
        lambda chance: chance.uniform(20, 180),
        lambda chance: chance.expovariate(1 / 100),
        lambda chance: 20 if chance.random() < 0.5 else 180,
    ],
    ids=["equal", "uniform", "exponential", "short-and-long"],
)
def test_under_a_constant_load_the_rate_is_that_of_the_starts(choose: Callable[[random.Random], float]) -> None:
    machine = Machine(lengths_of(choose))
    machine.run(200)
    begun = sum(at > 100 for at in machine.starts)
    for _ in range(20):
        machine.run(1.7)
        assert machine.estimate() == pytest.approx(begun / 100, rel=0.3)


@given(slots=st.integers(1, 64), speed=st.floats(1, 200), length=st.integers(4, 2000))
def test_for_requests_of_one_length_the_rate_is_slots_by_time(slots: int, speed: float, length: int) -> None:
    rate = ServiceRate(slots)
    generated = 0.0
    for _ in range(200):
        tokens = speed * STEP
        rate.observe(STEP, slots, round(slots * tokens), waiting=True)
        generated += tokens
        while generated >= length:
            generated -= length
            for _ in range(slots):
                rate.end(length)
    if speed * STEP * slots >= 10 and speed * 20 > length:  # rounding matters little, and requests have ended
        assert rate.starts_per_second(generated) == pytest.approx(slots * speed / length, rel=0.1)


def test_before_any_request_has_ended_tokens_give_the_rate() -> None:
    machine = Machine(lengths_of(lambda _: 1000))
    machine.run(KNOWN_AFTER - STEP)
    assert machine.estimate() == 0
    machine.run(25)
    assert not machine.rate._ended
    assert machine.estimate() >= SLOTS * SPEED / 1000, "requests cannot be shorter than they are already"


def test_a_light_load_leaves_the_rate_as_it_was() -> None:
    machine = Machine(lengths_of(lambda _: 100))
    machine.run(60)
    loaded = machine.estimate()
    machine.in_use, machine.speed = 2, 10 * SPEED
    machine.run(120)
    assert machine.estimate() == pytest.approx(loaded, rel=0.2)


def test_requests_that_become_longer_are_noticed_before_they_end() -> None:
    lengths = iter([10] * 500 + [10_000] * 500)
    machine = Machine(lengths)
    machine.run(14)
    assert machine.estimate() == pytest.approx(SLOTS * SPEED / 10, rel=0.3)
    while machine.generated < 2000:
        machine.run(1)
    assert machine.estimate() <= SLOTS * SPEED / 900


def test_the_rate_counts_fewer_slots_where_the_blocks_do_not_last() -> None:
    rate = ServiceRate(64)
    for _ in range(1000):
        rate.observe(STEP, 10, 20, waiting=True)
    rate.end(100)
    assert rate.concurrency == pytest.approx(10, rel=0.01)
    assert rate.starts_per_second(50) == pytest.approx(200 / 100, rel=0.05)
    rate.observe(STEP, 30, 60, waiting=False)
    assert rate.concurrency == 30


def test_requests_that_began_together_count_as_young() -> None:
    rate = ServiceRate(4)
    assert rate.youth(0) == 0, "nobody knows how long they are"
    rate.end(100)
    assert [rate.youth(generated) for generated in (0, 25, 50, 99)] == pytest.approx([0.5, 0.25, 0, 0])


@given(
    st.integers(1, 64),
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 64), st.integers(0, 10_000), st.booleans(), st.integers(-1, 500))
    ),
    st.floats(0, 1e6),
)
def test_the_rate_is_always_a_finite_number(
    slots: int, events: list[tuple[float, int, int, bool, int]], generated: float
) -> None:
    rate = ServiceRate(slots)
    for seconds, running, tokens, waiting, ended in events:
        rate.observe(seconds, running, tokens, waiting=waiting)
        if ended >= 0:
            rate.end(ended)
    assert 0 <= rate.starts_per_second(generated) < float("inf")
    assert 0 <= rate.youth(generated) <= 0.5
    assert rate.concurrency >= 1


def test_old_observations_are_forgotten() -> None:
    rate = ServiceRate(1)
    for tokens, length in ((1, 5), (10, 50)):
        for _ in range(round(5 * TAU / STEP)):
            rate.observe(STEP, 1, tokens, waiting=True)
        for _ in range(5 * RECENT):
            rate.end(length)
    assert rate.starts_per_second(0) == pytest.approx(100 / 50, rel=0.05)
