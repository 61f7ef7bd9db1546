"""Steps in flight: their order, their number and their times."""

import time

import numpy as np
import pytest

from pagewire.services.executor.devices.protocol import Int64, StepBatch
from pagewire.services.executor.steps.in_flight_step import InFlightStep
from pagewire.services.executor.steps.in_flight_steps import InFlightSteps
from pagewire.shared.sampling_parameters import record
from tests.services.executor.fakes import FakeDevice, FakePending, plan, token_at


class Clocked(FakeDevice):
    """A step takes two seconds of a clock that nobody else turns, and begins behind the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(depth=2)
        self.now, self.end = 100.0, 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.add(0, range(10), record(key=4))

    def launch(self, batch: StepBatch) -> FakePending:
        device, self.end = self, max(self.end, self.now) + 2.0
        pending, end = super().launch(batch), self.end

        class Slow(FakePending):
            def wait(self) -> Int64:
                device.now = max(device.now, end)
                return pending.wait()

        return Slow(self, np.empty(0, np.int64))


def step(start: int, width: int = 1) -> InFlightStep:
    one = np.array([0])
    batch = StepBatch(one, np.array([start]), np.array([width]), np.zeros(width, np.int64), np.array([True]))
    return InFlightStep(batch, one, one, np.full((1, 1), -1), np.array([False]), changes=0)


def test_steps_are_collected_in_order_with_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = InFlightSteps(Clocked(monkeypatch))
    assert (len(steps), steps.full) == (0, False)
    plans = [plan(1), plan(2)]
    steps.launch(step(3), 2, plans)
    steps.launch(step(4), 3, [])
    assert (len(steps), steps.full, steps.positions) == (2, True, 2)
    first, second = steps.collect(), steps.collect()
    assert (first.tokens.tolist(), first.plan, first.plans) == ([token_at(4, 4)], 2, plans)
    assert (second.tokens.tolist(), second.plan, second.plans) == ([token_at(4, 5)], 3, [])
    assert (len(steps), steps.positions) == (0, 0)


def test_the_time_of_a_step_begins_with_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Clocked(monkeypatch)
    steps = InFlightSteps(device)
    steps.launch(step(3), 1, [])
    device.now += 0.5
    steps.launch(step(4), 1, [])
    assert [steps.collect().elapsed, steps.collect().elapsed] == [2.0, 2.0]
    device.now += 3.0  # nothing is in flight
    steps.launch(step(5), 1, [])
    assert steps.collect().elapsed == 2.0


def test_discarded_steps_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Clocked(monkeypatch)
    steps = InFlightSteps(device)
    steps.launch(step(3), 1, [])
    steps.launch(step(4), 1, [])
    steps.discard()
    assert (len(steps), device.now, device.busy) == (0, 104.0, 1.0)
    assert not device.pending


def test_the_limit_of_a_step_grows_with_its_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Clocked(monkeypatch)
    steps = InFlightSteps(device)
    steps.launch(step(0, 20), 1, [])
    steps.launch(step(20, 16), 1, [])
    overdue = []
    for later in (20 + 18, 1):
        device.now += later
        overdue.append(steps.overdue)
    steps.collect()
    for later in (20 + 8, 1):  # the other one gets its own time from there
        device.now += later
        overdue.append(steps.overdue)
    steps.collect()
    device.now += 1000
    assert [*overdue, steps.overdue] == [False, True, False, True, False]


def test_a_starved_step_is_not_overdue_while_the_device_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Clocked(monkeypatch)
    steps = InFlightSteps(device)
    steps.launch(step(0, 20), 1, [])
    for layer in range(1000):  # hours
        device.now += 10
        device.progress += layer % 3 == 2
        assert not steps.overdue
    device.now += 31  # it hangs
    assert steps.overdue
