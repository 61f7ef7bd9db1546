"""The expected wait of a request, and the requests that are refused because of it."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.dispatch.admission import (
    AGEING,
    MARGIN,
    MAX_RETRY_MS,
    MIN_RETRY_MS,
    UNKNOWN_RETRY_MS,
    Admission,
    Load,
    combine,
    expected_wait,
)
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.backlog import Backlog
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process.peers import SILENCE, Peers

pytestmark = pytest.mark.anyio

URGENT, NORMAL, BACKGROUND = range(3)
BUSY = Load((0, 49, 0), (0, 5.0, 0), 5.0, 0)
"""Fifty requests, the new one among them, start within 10 s."""

counts = st.floats(0, 1e5)
rates = st.floats(0, 1e4)
loads = st.builds(
    Load,
    waiting=st.tuples(counts, counts, counts),
    starts=st.tuples(rates, rates, rates),
    rate=st.floats(0.001, 1e4),
    free=st.floats(0, 1000),
    delay=st.floats(0, 100),
)


def wait(load: Load, rank: int = NORMAL, others: float = 0.0) -> float:
    seconds = expected_wait(load, rank, others)
    assert seconds is not None
    return seconds


def test_the_wait_is_the_requests_ahead_by_the_rate() -> None:
    assert wait(BUSY) == 10
    assert wait(BUSY, others=10) == 12
    assert wait(replace(BUSY, delay=3.0)) == 13
    assert wait(replace(BUSY, waiting=(10, 49, 0))) == 12


def test_free_slots_are_taken_at_once() -> None:
    assert wait(replace(BUSY, free=50, delay=3.0)) == 0
    assert wait(replace(BUSY, free=45)) == 1
    assert wait(Load()) == 0


def test_without_a_rate_the_wait_is_unknown() -> None:
    assert expected_wait(replace(BUSY, rate=0), NORMAL) is None
    assert expected_wait(replace(BUSY, rate=0, free=50), NORMAL) == 0


def test_later_urgent_requests_overtake_for_a_while() -> None:
    assert wait(Load((0, 9, 0), (3.0, 2.0, 0), 5.0, 0)) == 5, "two of five starts are left"
    drowned = Load((0, 49, 0), (5.0, 0, 0), 5.0, 0)
    assert wait(drowned) == 10 + AGEING


@given(loads, st.integers(0, 2), counts)
def test_less_urgent_requests_do_not_add_to_the_wait(load: Load, rank: int, others: float) -> None:
    above = replace(load, waiting=[*load.waiting[: rank + 1], 0, 0][:3], starts=[*load.starts[: rank + 1], 0, 0][:3])
    assert expected_wait(load, rank, others) == expected_wait(above, rank, others)


@given(loads, st.integers(0, 2), counts)
def test_the_wait_grows_with_requests_ahead_and_shrinks_with_the_rate(load: Load, rank: int, more: float) -> None:
    assert 0 <= wait(load, rank) <= wait(load, rank, more)
    assert wait(replace(load, rate=load.rate * 2), rank) <= wait(load, rank) * (1 + 1e-9)


@given(loads)
def test_urgent_requests_wait_least(load: Load) -> None:
    waits = [wait(load, rank) for rank in range(3)]
    assert waits == sorted(waits)


def report(
    scheduler: str = "a",
    stored: tuple[int, ...] = (),
    last: int = 0,
    started: tuple[int, ...] = (0, 0, 0),
    rate: float = 5.0,
    free: float = 0.0,
    starts: tuple[float, ...] = (0.0, 0.0, 0.0),
    delay: float = 0.0,
) -> Backlog:
    return Backlog(scheduler, started, starts, rate, free, stored, last, delay)


def test_a_stored_request_that_has_not_started_waits() -> None:
    counted = report(stored=(1, 60, 7), last=9, started=(0, 11, 9), starts=(0.5, 1, 0), delay=2.0)
    other = report("b", started=(0, 9, 0), starts=(0, 2, 0), free=3.0, delay=4.0)
    load = combine([counted, other], counted, before=0)
    assert load == Load([1, 40, 0], [0.5, 3, 0], 10.0, 3.0, 9, 3.0)


def test_a_new_replica_counts_with_the_rate_of_the_others() -> None:
    counted, begun, idle = report(stored=(0, 0, 0)), report("b", rate=0, free=8), report("c", rate=0, free=0)
    assert combine([counted, begun], counted, before=0).rate == 10
    assert combine([counted, idle], counted, before=0).rate == 5, "it has no executor"
    assert combine([idle], counted, before=7).rate == 7, "it was known before"


class Scene:
    """The admission of one tokenizer, and schedulers that the test plays."""

    def __init__(self, max_wait: float | None = 10.0) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.in_progress = 0
        self.peers = Peers(self.bus)
        self.admission = Admission(self.bus, "m", self.peers, lambda: self.in_progress, max_wait)

    async def start(self) -> "Scene":
        await self.peers.listen("tokenizer")
        await self.admission.listen()
        return self

    async def say(self, *reports: Backlog, model: str = "m") -> None:
        for each in reports:
            self.bus.publish(f"{subjects.BACKLOG}.{model}.{each.scheduler}", encode(each))
        await self.bus.flush()

    def refused(self, priority: int = 0, timeout: float = 3600.0) -> int:
        """Milliseconds after which the refused client should come back; 0: it is admitted."""
        refusal = self.admission.refusal(priority, timeout)
        assert refusal is None or refusal.retry_after_ms
        return 0 if refusal is None else refusal.retry_after_ms or 0


def frozen(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands where the test puts it."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


async def test_a_request_that_would_wait_longer_than_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen(monkeypatch)
    scene = await Scene().start()
    may_refuse = [scene.admission.may_refuse]
    assert not scene.refused(), "nothing is known"
    await scene.say(report(stored=(0, 39, 0)))
    may_refuse.append(scene.admission.may_refuse)
    assert may_refuse == [False, True]
    assert not scene.refused()
    await scene.say(report(stored=(0, 40, 0)))
    assert scene.refused() == pytest.approx(8200)
    assert scene.admission.refused == 1
    assert "max-queue-wait" in str(scene.admission.refusal(0, 3600))


async def test_a_request_that_could_not_start_before_its_deadline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen(monkeypatch)
    scene = await Scene(max_wait=None).start()
    await scene.say(report(stored=(0, 499, 0)))
    assert scene.refused(timeout=100) == 100_000
    assert scene.refused(timeout=100 / MARGIN - 1)
    assert not scene.refused(timeout=100 / MARGIN + 1)
    assert "timeout_ms" in str(scene.admission.refusal(0, 100))


async def test_an_overload_refuses_background_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen(monkeypatch)
    scene = await Scene().start()
    await scene.say(report(stored=(0, 20, 1000)))
    assert not scene.refused(priority=-1)
    assert not scene.refused(priority=0)
    assert scene.refused(priority=1) == pytest.approx(204_200)


async def test_a_stored_request_counts_until_a_report_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen(monkeypatch)
    scene = await Scene().start()
    await scene.say(report(stored=(0, 0, 0), last=100))
    for number in range(101, 151):
        scene.admission.on_stored(0, number)
    assert scene.refused() == 10_200
    assert not scene.refused(priority=-1)
    await scene.say(report(stored=(0, 10, 0), last=140))
    assert scene.admission.retry_after_ms(0) == 4200
    scene.in_progress = 5
    assert scene.admission.retry_after_ms(0) == 5200
    scene.admission.on_stored(0, 120)
    assert scene.admission.retry_after_ms(0) == 5200, "the answer of the store came after the report"
    await scene.say(report(stored=(0, 0, 0), last=3))
    assert scene.admission.retry_after_ms(0) == 1200, "the store is a new one"


async def test_each_tokenizer_assumes_that_the_others_sent_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen(monkeypatch)
    scene = await Scene().start()
    for name in ("t1", "t2", "t3"):
        beat = Heartbeat("tokenizer", name, True, 0, 0, 0, {})
        scene.bus.publish(f"{subjects.HEARTBEAT}.tokenizer.{name}", encode(beat))
    await scene.bus.flush()
    await scene.say(report(stored=(0, 0, 0)))
    for number in range(1, 11):
        scene.admission.on_stored(0, number)
    assert scene.admission.retry_after_ms(0) == 6200


async def test_requests_are_assumed_to_start_between_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    now = frozen(monkeypatch)
    scene = await Scene().start()
    await scene.say(report(stored=(0, 49, 0)))
    now[0] += 0.4
    assert scene.admission.retry_after_ms(0) == 9600
    now[0] += 60
    assert scene.admission.retry_after_ms(0) == 9000, "without reports, nobody knows whether any starts"


async def test_a_silent_scheduler_is_gone_and_the_rate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = frozen(monkeypatch)
    scene = await Scene().start()
    await scene.say(report("b", started=(0, 20, 0)), report("a", stored=(0, 69, 0)))
    assert scene.admission.retry_after_ms(0) == 5000
    now[0] += SILENCE
    await scene.say(report("a", stored=(0, 69, 0)))
    assert scene.admission.retry_after_ms(0) == 14_000
    await scene.say(report("a", stored=(0, 69, 0), rate=0))
    assert scene.admission.retry_after_ms(0) == 14_000


async def test_other_models_and_unreadable_reports_do_not_count() -> None:
    scene = await Scene().start()
    await scene.say(report(stored=(0, 1000, 0)), model="other")
    scene.bus.publish(f"{subjects.BACKLOG}.m.a", b"\x01nonsense")
    await scene.bus.flush()
    assert not scene.admission.may_refuse


async def test_the_retry_time_is_bounded() -> None:
    scene = await Scene().start()
    assert scene.admission.retry_after_ms(0) == MIN_RETRY_MS
    await scene.say(report(stored=(0, 1000, 0), rate=0))
    assert scene.admission.retry_after_ms(0) == UNKNOWN_RETRY_MS
    await scene.say(report(stored=(0, 10**6, 0), rate=1.0))
    assert scene.admission.retry_after_ms(0) == MAX_RETRY_MS
    assert scene.admission.gauges["queued"] == 10**6
