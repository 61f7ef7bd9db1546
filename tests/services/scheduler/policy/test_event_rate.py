import pytest

from pagewire.services.scheduler.policy.event_rate import TAU, EventRate


def test_a_steady_rate_is_measured_from_the_first_seconds_on() -> None:
    rate = EventRate(100.0)
    assert rate.at(100.0) == 0
    for i in range(1, 1001):
        now = 100.0 + i * 0.1
        rate.add(1, now)
        if i >= 20:
            assert rate.at(now) == pytest.approx(10.0, rel=0.05)


def test_the_rate_falls_without_events() -> None:
    rate = EventRate(0.0)
    for second in range(1, 101):
        rate.add(10, float(second))
    before = rate.at(100.0)
    assert rate.at(100.0 + TAU) == pytest.approx(before / 2.718, rel=0.01)
    assert rate.at(100.0 + 20 * TAU) < 0.001


def test_events_at_one_moment_count_each() -> None:
    rate = EventRate(0.0)
    rate.add(30, 1.0)
    assert rate.at(1.0) == pytest.approx(31.5, rel=0.01)
