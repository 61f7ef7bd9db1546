from argparse import ArgumentTypeError
from collections import Counter
from itertools import islice

import pytest

from pagewire.bench._chaos.schedule import KINDS, Fault, schedule, select


def test_a_seed_gives_the_same_faults_each_time() -> None:
    first, again, other = (list(islice(schedule(seed), 60)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_every_kind_comes_as_often_as_every_other() -> None:
    faults = list(islice(schedule(1), 10 * len(KINDS)))
    assert set(Counter(fault.kind for fault in faults).values()) == {10}


def test_freezes_and_cuts_are_shorter_and_longer_than_the_limit_of_silence() -> None:
    for kind in ("stop:scheduler", "cut:executor"):
        lasting = [fault.seconds for fault in islice(schedule(1, [kind]), 40)]
        assert min(lasting) < 2 < max(lasting)
    assert next(schedule(1, ["kill:broker"])).seconds == 0
    assert all(fault.seconds > 2 for fault in islice(schedule(1, ["starve:executor", "busy:machine"]), 40))


def test_kinds_are_chosen_by_name_and_by_action() -> None:
    assert select("stop:scheduler, cut") == ("stop:scheduler", *(kind for kind in KINDS if kind.startswith("cut:")))
    others = "kill,stop,term,cut,full,starve,busy,delete,purge,edit,pause,damage,join"
    assert set(select(others)) == {kind for kind in KINDS if kind != "skew:clocks"}
    with pytest.raises(ArgumentTypeError, match="no fault burn"):
        select("kill,burn")


def test_wrong_clocks_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.bench._chaos.schedule.COMPILER", None)
    with pytest.raises(ArgumentTypeError, match="C compiler"):
        select("skew")
    monkeypatch.setattr("pagewire.bench._chaos.schedule.COMPILER", "/usr/bin/cc")
    assert select("skew") == ("skew:clocks",)


def test_a_fault_has_an_action_and_a_target() -> None:
    assert (Fault("stop:scheduler").action, Fault("stop:scheduler").target) == ("stop", "scheduler")
