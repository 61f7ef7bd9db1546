"""The number of threads that compute on the CPU, by the load of its cores, and their priorities."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.devices.cpu.cores import (
    ALONE_NICENESS,
    INTERVAL,
    MARGIN,
    SHARED_NICENESS,
    SPARE,
    Cores,
    CpuUsage,
    next_threads,
    read_cpu_usage,
)

TICKS = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))
LOADS = st.floats(0, 64)


@given(threads=st.integers(1, 64), more=st.integers(0, 64), computing=LOADS, idle=LOADS)
@settings(deadline=None)
def test_there_is_always_a_thread_and_one_comes_back_at_a_time(
    threads: int, more: int, computing: float, idle: float
) -> None:
    most = threads + more
    assert 1 <= next_threads(threads, most, computing, idle) <= min(most, threads + 1)


@given(threads=st.integers(1, 63), computing=LOADS, idle=st.floats(SPARE, 64))
@settings(deadline=None)
def test_cores_to_spare_bring_a_thread_back(threads: int, computing: float, idle: float) -> None:
    assert next_threads(threads, 64, computing, idle) == threads + 1


@given(threads=st.integers(1, 64), computing=LOADS, idle=st.floats(0, MARGIN, exclude_max=True))
@settings(deadline=None)
def test_without_idle_cores_computing_keeps_the_cores_it_has_used(threads: int, computing: float, idle: float) -> None:
    kept = next_threads(threads, 64, computing, idle)
    assert kept <= threads
    assert kept >= min(threads, computing)


@pytest.mark.parametrize(
    ("threads", "computing", "idle", "then"),
    [
        (2, 0.8, 0.15, 1),  # a small model under load
        (1, 0.85, 0.3, 1),  # and alone on its core
        (1, 1.05, 0.2, 2),  # one core is too few for it
        (1, 1.05, 0.05, 1),  # but the services have the other
        (2, 1.9, 0.0, 2),  # a model for which the services hardly count
        (2, 0.95, 0.2, 2),  # too close to a whole core
        (1, 0.4, 1.2, 2),  # a single client
    ],
)
def test_on_two_cores_the_thread_count_follows_the_load(threads: int, computing: float, idle: float, then: int) -> None:
    assert next_threads(threads, 2, computing, idle) == then


def counters(user: float, idle: float) -> str:
    """A /proc/stat of seconds that the cores have shared evenly."""
    each = f"{user * TICKS / CORES:.0f} 0 0 {idle * TICKS / CORES:.0f} 0 0 0 0 0 0"
    lines = [f"cpu{core} {each}" for core in os.sched_getaffinity(0)]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 12345 0 0", "ctxt 99", ""])


def test_usage_is_read_as_linux_counts_it(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 20 30 400 50 6 7 8 90 10\n"
        "cpu1 1 1 1 1 1 1 1 1 0 0\n"
        "cpu10 1000 1000 1000 1000 1000 1000 1000 1000 0 0\n"
        "intr 1 2 3\n"
        "\n"
    )
    assert read_cpu_usage(stat, {0, 1}) == CpuUsage(total=(621 + 8) / TICKS, idle=(450 + 2) / TICKS)


def test_the_counters_of_this_machine_are_read() -> None:
    used = read_cpu_usage(Path("/proc/stat"), os.sched_getaffinity(0))
    assert used.total >= used.idle >= 0


@dataclass
class Machine:
    """Cores that share a machine of which this test says who used it."""

    stat: Path
    clock: pytest.MonkeyPatch
    counts: list[int] = field(default_factory=list)
    now: float = 100.0
    computed: float = 0.0
    user: float = 0.0
    idle: float = 0.0

    def begin(self, most: int = 2) -> Cores:
        self.stat.write_text(counters(0, 0))
        self.cores = Cores(most, self.counts.append, self.stat)
        self.cores.adjust(self.now)
        return self.cores

    def passes(self, seconds: float, *, computing: float, idle: float) -> None:
        """`computing` and `idle` are cores; the rest was used by others."""
        self.now += seconds
        self.computed += seconds * computing
        self.idle += seconds * idle
        self.user += seconds * (CORES - idle)
        self.stat.write_text(counters(self.user, self.idle))
        self.clock.setattr(time, "process_time", lambda: self.computed)
        self.cores.adjust(self.now)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    return Machine(tmp_path / "stat", monkeypatch)


def test_a_thread_is_given_up_under_load_and_comes_back_behind_it(machine: Machine) -> None:
    machine.begin()
    machine.passes(INTERVAL, computing=0.8, idle=0.1)
    assert machine.counts == [2, 1]
    machine.passes(INTERVAL, computing=0.8, idle=0.1)
    assert machine.counts == [2, 1]
    machine.passes(INTERVAL, computing=0.2, idle=1.5)
    assert machine.counts == [2, 1, 2]


def test_a_measurement_over_a_pause_does_not_count(machine: Machine) -> None:
    machine.begin()
    machine.passes(3600, computing=0.0, idle=0.0)
    assert machine.counts == [2]
    machine.passes(INTERVAL, computing=0.8, idle=0.1)
    assert machine.counts == [2, 1]


def test_all_threads_compute_behind_a_pause(machine: Machine) -> None:
    machine.begin()
    machine.passes(INTERVAL, computing=0.8, idle=0.1)
    machine.passes(3600, computing=0.0, idle=0.0)
    assert machine.counts == [2, 1, 2]


def test_a_single_thread_is_never_given_up(machine: Machine) -> None:
    machine.begin(most=1)
    machine.passes(INTERVAL, computing=0.3, idle=0.0)
    machine.passes(INTERVAL, computing=0.3, idle=1.0)
    assert machine.counts == [1]


def test_most_steps_do_not_read_the_counters(machine: Machine) -> None:
    cores = machine.begin()
    machine.stat.write_text("cpu0 not a number")  # would not go unnoticed
    for step in range(10):
        cores.adjust(machine.now + INTERVAL * step / 11)


def test_a_system_without_counters_keeps_its_threads(machine: Machine) -> None:
    cores = machine.begin()
    machine.stat.unlink()
    cores.adjust(machine.now + INTERVAL)
    assert machine.counts == [2]


def test_a_sandbox_with_constant_counters_keeps_its_threads(machine: Machine) -> None:
    cores = machine.begin()
    for look in range(1, 4):
        cores.adjust(machine.now + look * INTERVAL)
    assert machine.counts == [2]


@dataclass
class Niceness:
    """Niceness of a thread: while its process computes on several threads, on one, and on several again."""

    together: int
    alone: int
    again: int


def compute(stat: Path, monkeypatch: pytest.MonkeyPatch, thread: int = 0) -> Niceness:
    """Returns the niceness of a `thread` while another one computes; 0: of the one that computes."""

    def run() -> Niceness:
        machine = Machine(stat, monkeypatch)
        machine.begin()
        together = os.getpriority(os.PRIO_PROCESS, thread)
        machine.passes(INTERVAL, computing=0.8, idle=0.1)
        alone = os.getpriority(os.PRIO_PROCESS, thread)
        machine.passes(INTERVAL, computing=0.8, idle=1.0)
        return Niceness(together, alone, os.getpriority(os.PRIO_PROCESS, thread))

    with ThreadPoolExecutor(1) as computing:
        return computing.submit(run).result()


def may_have(nice: int) -> bool:
    def ask() -> bool:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except PermissionError:
            return False
        return True

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()


@pytest.mark.parametrize("nice", [0, 10])
def test_a_single_thread_goes_first_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nice: int
) -> None:
    """Among those that the whole pipeline was made to compete with."""
    here = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr("pagewire.services.executor.devices.cpu.cores.NICE", here + nice)
    polite = min(19, here + nice + SHARED_NICENESS)
    alone = here + nice + ALONE_NICENESS
    expected = Niceness(polite, max(-20, alone) if may_have(alone) else polite, polite)
    assert compute(tmp_path / "stat", monkeypatch) == expected


def test_no_computing_thread_goes_before_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = compute(tmp_path / "stat", monkeypatch, os.getpid())
    computing = compute(tmp_path / "stat", monkeypatch)
    assert loop.alone <= computing.alone
    assert loop.together <= computing.together


def test_thread_counts_still_change_where_priorities_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    machine = Machine(tmp_path / "stat", monkeypatch)
    machine.begin()
    machine.passes(INTERVAL, computing=0.8, idle=0.1)
    assert machine.counts == [2, 1]
