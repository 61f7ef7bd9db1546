"""Queues are pulled for as many items as there is room for, also those of a replica that has gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagewire.services.scheduler import work_consumer
from pagewire.services.scheduler.work_consumer import WorkConsumer
from pagewire.shared import subjects
from pagewire.shared.bus import Item
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.memory_store import MemoryStore
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process.peers import Peers
from pagewire.shared.wire_version import WIRE_VERSION
from tests.support.waiting import PATIENCE, until

OWN, ANYONE, OTHER = (subjects.work_queue("m", 0, target) for target in ("me", subjects.ANY, "other"))

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_consumer, "SILENCE", 0.05)
    monkeypatch.setattr(work_consumer, "LOOK_EVERY", 0.02)
    monkeypatch.setattr(work_consumer, "PULL_EXPIRES", 0.05)
    monkeypatch.setattr(work_consumer, "RETRY_AFTER", 0.01)


class Scene:
    """A consumer with as much capacity as the test gives it."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.peers = Peers(self.bus)
        self.capacities: dict[str, int] = {}
        self.room = 8
        self.taken: list[tuple[str, bytes]] = []
        self.items: list[Item] = []
        self.consumer = WorkConsumer(self.bus.store, self.peers, "m", "me", self.count, self.held, self.take)

    def count(self, queue: str) -> int:
        return self.capacities.get(queue, self.room)

    def held(self, queue: str) -> int:
        return 0  # so that the store is asked who has them

    def take(self, queue: str, item: Item) -> None:
        self.taken.append((queue, item.data))
        self.items.append(item)
        if queue in self.capacities:
            self.capacities[queue] -= 1

    def beat(self, scheduler: str, *, ready: bool = True) -> None:
        beat = Heartbeat("scheduler", scheduler, ready, 1, 0, 0, {})
        self.bus.publish(f"{subjects.HEARTBEAT}.scheduler.{scheduler}", encode(beat))


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    s = Scene()
    await s.peers.listen("scheduler")
    running = asyncio.create_task(s.consumer.run())
    try:
        yield s
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_scheduler_takes_its_own_and_common_work_of_every_priority() -> None:
    async with scene() as s:
        queues = subjects.work_queues("m", "me") + subjects.work_queues("m", subjects.ANY)
        for queue in queues:
            await s.bus.store.put_work(queue, queue.encode())
        await until(lambda: len(s.taken) == 6)
        assert sorted(s.taken) == sorted((queue, queue.encode()) for queue in queues)


async def test_a_queue_without_room_is_left_and_holds_up_no_other() -> None:
    async with scene() as s:
        s.capacities[ANYONE] = 2
        for i in range(5):
            await s.bus.store.put_work(ANYONE, b"%d" % i)
        await until(lambda: len(s.taken) == 2)
        urgent = subjects.work_queue("m", -1, subjects.ANY)
        await s.bus.store.put_work(urgent, b"urgent")
        await until(lambda: (urgent, b"urgent") in s.taken)
        assert len(s.taken) == 3
        s.capacities[ANYONE] = 3
        s.consumer.notify()
        await until(lambda: len(s.taken) == 6)


async def test_work_of_a_replica_that_lives_is_left_alone_until_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene() as s:
        await s.bus.store.put_work(OTHER, b"x")
        s.beat("other")
        await asyncio.sleep(0.2)  # several looks: that nothing happens is what is tested
        assert not s.taken
        monkeypatch.setattr("pagewire.shared.process.peers.SILENCE", 0.0)
        await until(lambda: s.taken == [(OTHER, b"x")])


async def test_work_of_a_replica_that_cannot_run_it_is_taken() -> None:
    async with scene() as s:
        s.beat("other", ready=False)
        await s.bus.store.put_work(OTHER, b"x")
        await until(lambda: s.taken == [(OTHER, b"x")])
        s.beat("other")
        await s.bus.store.end_work(s.items[0].ack)
        await asyncio.sleep(0.15)
        await s.bus.store.put_work(OTHER, b"y")
        await asyncio.sleep(0.15)
        assert len(s.taken) == 1, "it is back, and its work is its own again"


async def test_work_of_another_wire_version_is_left_alone() -> None:
    async with scene() as s:
        newer = OTHER.replace(f"m.{WIRE_VERSION}.", f"m.{WIRE_VERSION + 1}.")
        await s.bus.store.put_work(newer, b"newer")
        await s.bus.store.put_work(OTHER, b"ours")
        await until(lambda: bool(s.taken))
        assert s.taken == [(OTHER, b"ours")]
        assert [item.data for item in await s.bus.store.pull_work(newer, 1, expires=1)] == [b"newer"]


async def test_items_held_by_a_dead_replica_come_with_their_redelivery() -> None:
    async with scene() as s:
        await s.bus.store.put_work(OTHER, b"x")
        (held,) = await s.bus.store.pull_work(OTHER, 1, expires=1)
        await s.bus.store.return_work(held.ack)
        await until(lambda: s.taken == [(OTHER, b"x")])
        assert s.items[0].deliveries == 2


async def test_a_queue_that_cannot_be_reached_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene() as s:
        failures = []

        async def fail(*_: object, **__: object) -> list[Item]:
            failures.append(1)
            raise BusUnavailable("gone")

        with monkeypatch.context() as broken:
            broken.setattr(s.bus.store, "pull_work", fail)
            broken.setattr(s.bus.store, "queue_lengths", fail)
            await until(lambda: len(failures) > 12)
        await s.bus.store.put_work(OWN, b"x")
        await s.bus.store.put_work(OTHER, b"y")
        await until(lambda: sorted(s.taken) == [(OWN, b"x"), (OTHER, b"y")])


async def test_a_stuck_queue_is_told_to_deliver_its_items_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its position may be ahead of its items, since the disk has lost some, or somebody has paused it."""
    async with scene() as s:
        mended, pull = asyncio.Event(), MemoryStore.pull_work

        async def pull_nothing(store: MemoryStore, queue: str, count: int, *, expires: float) -> list[Item]:
            if mended.is_set():
                return await pull(store, queue, count, expires=expires)
            await asyncio.sleep(expires)
            return []

        async def deliver_anew(_: MemoryStore, queue: str) -> None:
            assert queue == ANYONE
            mended.set()

        monkeypatch.setattr(MemoryStore, "pull_work", pull_nothing)
        monkeypatch.setattr(MemoryStore, "deliver_anew", deliver_anew)
        await s.bus.store.put_work(ANYONE, b"stuck")
        await until(lambda: s.taken == [(ANYONE, b"stuck")])
        await until(lambda: not s.consumer.problem)


async def test_a_queue_of_a_cluster_has_the_time_of_an_election(monkeypatch: pytest.MonkeyPatch) -> None:
    anew: list[str] = []
    looks = 0

    async def pull_nothing(store: MemoryStore, queue: str, count: int, *, expires: float) -> list[Item]:
        await asyncio.sleep(expires)
        return []

    async def undelivered(_: MemoryStore, queue: str) -> int:
        nonlocal looks
        looks += 1
        return 1

    async def deliver_anew(_: MemoryStore, queue: str) -> None:
        anew.append(queue)

    monkeypatch.setattr(MemoryStore, "pull_work", pull_nothing)
    monkeypatch.setattr(MemoryStore, "undelivered", undelivered)
    monkeypatch.setattr(MemoryStore, "deliver_anew", deliver_anew)
    monkeypatch.setattr(MemoryStore, "election_time", PATIENCE)
    async with scene() as s:
        await s.bus.store.put_work(ANYONE, b"waits")
        await until(lambda: looks >= 5)
        assert not anew
        monkeypatch.setattr(MemoryStore, "election_time", 0.1)
        await until(lambda: anew == [ANYONE])


async def test_a_queue_that_cannot_be_asked_keeps_its_time_and_a_refusal_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[int | BusUnavailable] = [1, BusUnavailable("no leader")]
    refusals = [BusUnavailable("no leader"), BusUnavailable("no leader")]
    mended = asyncio.Event()

    async def pull_nothing(store: MemoryStore, queue: str, count: int, *, expires: float) -> list[Item]:
        await asyncio.sleep(expires)
        return []

    async def undelivered(_: MemoryStore, queue: str) -> int:
        answer = answers.pop(0) if answers else BusUnavailable("no leader")
        if isinstance(answer, BusUnavailable):
            raise answer
        return answer

    async def deliver_anew(_: MemoryStore, queue: str) -> None:
        if refusals:
            raise refusals.pop()
        mended.set()

    monkeypatch.setattr(MemoryStore, "pull_work", pull_nothing)
    monkeypatch.setattr(MemoryStore, "undelivered", undelivered)
    monkeypatch.setattr(MemoryStore, "deliver_anew", deliver_anew)
    async with scene() as s:
        await s.bus.store.put_work(ANYONE, b"waits")
        async with asyncio.timeout(PATIENCE):
            await mended.wait()


async def test_items_delivered_to_others_do_not_make_a_queue_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    anew: list[str] = []

    async def deliver_anew(_: MemoryStore, queue: str) -> None:
        anew.append(queue)

    monkeypatch.setattr(MemoryStore, "deliver_anew", deliver_anew)
    async with scene() as s:
        await s.bus.store.put_work(ANYONE, b"taken")
        await until(lambda: s.taken)
        await asyncio.sleep(0.5)  # many looks
        assert anew == []
