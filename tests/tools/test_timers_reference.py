"""Every timer of the code has an answer."""

from tools.timers_reference import KINDS, timers


def test_every_timer_says_what_happens_where_the_world_takes_ten_times_longer() -> None:
    answered = [(path, name) for kind in KINDS for path, names in kind.timers.items() for name in names]
    declared = [(timer.path, timer.name) for timer in timers()]
    assert sorted(answered) == sorted(declared), "add new timers to `KINDS`, and remove those that are gone"
