"""Every timer of the code has an answer."""

from tools.timers_reference import KINDS, timers


def test_every_timer_is_explained_for_a_world_ten_times_slower() -> None:
    answered = [(path, name) for kind in KINDS for path, names in kind.timers.items() for name in names]
    declared = [(timer.path, timer.name) for timer in timers()]
    assert sorted(answered) == sorted(declared), "add new timers to `KINDS`, and remove those that are gone"
