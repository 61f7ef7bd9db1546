"""The time of a step is learnt by its positions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.speculation.step_cost import MAX_POSITIONS, StepCost, increasing


@given(st.lists(st.tuples(st.floats(0.001, 10), st.floats(0.1, 10)), min_size=1, max_size=30))
def test_times_never_fall_and_keep_their_mean(pairs: list[tuple[float, float]]) -> None:
    times, weights = np.array([time for time, _ in pairs]), np.array([weight for _, weight in pairs])
    fitted = increasing(times, weights)
    assert (np.diff(fitted) >= 0).all()
    assert np.isclose((fitted * weights).sum(), (times * weights).sum())


def test_positions_cost_the_same_each_before_a_step_has_run() -> None:
    assert StepCost().seconds(3, 2).tolist() == [3.0, 4.0, 5.0]


def test_times_between_two_sizes_are_on_a_line() -> None:
    cost = StepCost()
    cost.observe(1, 0.010)
    cost.observe(8, 0.017)
    assert np.allclose(cost.seconds(1, 7), 0.010 + 0.001 * np.arange(8))
    assert np.allclose(cost.seconds(8, 8), 0.017 / 8 * np.arange(8, 17)), "beyond, a position costs the mean"
    assert cost.seconds(MAX_POSITIONS, 3).tolist() == [cost.seconds(MAX_POSITIONS, 0)[0]] * 4


def test_steps_that_waited_for_another_program_change_little() -> None:
    cost = StepCost()
    for number in range(300):
        cost.observe(4, 0.5 if number % 3 == 1 else 0.010)
    assert 0.008 < cost.seconds(4, 0)[0] < 0.012


def test_steps_of_neighbouring_sizes_are_counted_at_their_mean() -> None:
    cost = StepCost()
    for number in range(100):
        cost.observe(34 + number % 2, 0.035)
    cost.observe(64, 0.064)
    assert np.allclose(cost.seconds(50, 0), 0.050, atol=0.002)
