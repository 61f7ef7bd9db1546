from hypothesis import given
from hypothesis import strategies as st

from tools.experiments.simulated_devices.virtual_time.clock import Clock


@given(st.lists(st.floats(0, 10)))
def test_actions_happen_in_the_order_of_their_times(times: list[float]) -> None:
    clock = Clock()
    happened: list[tuple[float, int]] = []
    for number, when in enumerate(times):
        clock.at(when, lambda when, number: happened.append((when, number)), when, number)
    clock.run()
    assert happened == sorted((when, number) for number, when in enumerate(times))


def test_an_event_can_schedule_another() -> None:
    clock = Clock()
    seen: list[float] = []

    def tick() -> None:
        seen.append(clock.now)
        if clock.now < 3:
            clock.at(clock.now + 1, tick)

    clock.at(0.5, tick)
    clock.run()
    assert seen == [0.5, 1.5, 2.5, 3.5]
