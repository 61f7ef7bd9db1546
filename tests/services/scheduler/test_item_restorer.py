"""A request that is held has an item in the store, whatever an administrator or a disk has done to the first one."""

import asyncio
from collections.abc import Callable

import pytest

from pagewire.services.scheduler import item_restorer
from pagewire.services.scheduler.item_restorer import ItemRestorer
from pagewire.services.scheduler.request import Request
from pagewire.shared import subjects
from pagewire.shared.bus import Item
from pagewire.shared.messages import pack
from pagewire.shared.messages.work import Sampling, WorkItem
from tests.services.scheduler.test_service import MODEL, Scene, scene
from tests.support.broker import connect_role, connect_service, running_broker
from tests.support.executor import generate
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

OWN = subjects.work_queue(MODEL, 0, "sched")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_restorer, "CHECK_INTERVAL", 0.05)


async def lengths(s: Scene) -> dict[str, int]:
    return dict((await s.bus.store.queue_lengths(MODEL)).items)


async def test_an_item_that_has_vanished_is_stored_again_and_the_request_goes_on() -> None:
    async with scene() as s:
        s.executor.free_running = False
        await s.work("r", [5, 6], 20)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        first = s.detokenizer.attached[0]
        await s.bus.store.end_work(first.ack)  # as if somebody had purged it
        await until(lambda: s.detokenizer.attached[-1].ack != first.ack)
        assert await lengths(s) == {OWN: 1}, "it is this scheduler's own, until that is gone"
        await until(lambda: s.load("item_checks") > 2)
        s.executor.free_running = True
        s.executor.run()
        await s.detokenizer.until(lambda: s.detokenizer.tokens[first.first_sequence] == generate([5, 6], 20, []))
        assert len(s.executor.plans[0].added) == 1, "it runs once"


async def test_the_request_of_an_item_that_was_stored_again_outlives_its_scheduler() -> None:
    async with scene(ack_wait=0.2) as s:
        s.executor.free_running = False
        await s.work("r", [5, 6], 20)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        first = s.detokenizer.attached[0]
        await s.bus.store.end_work(first.ack)
        await until(lambda: s.detokenizer.attached[-1].ack != first.ack)
    assert len(await s.bus.store.pull_work(OWN, 1, expires=5)) == 1


def test_a_request_is_in_the_queue_of_its_last_item() -> None:
    work = WorkItem("r", "detok", (pack([5, 6]),), 1, Sampling(6), 0, 2e9)
    request = Request.of(Item(b"", {}, "ack", 1, 1, 0.0), work, "queue")
    request.note_delivery(Item(b"", {}, "ack", 2, 1, 0.0), work, OWN)
    assert (request.number, request.queue) == (2, OWN)


@pytest.mark.parametrize("reconnects", [False, True])
async def test_a_scheduler_has_the_rights_to_store_an_item_again(
    monkeypatch: pytest.MonkeyPatch, *, reconnects: bool
) -> None:
    """After a reconnection items are looked for by name."""
    work = WorkItem("r", "detok", (pack([5, 6]),), 1, Sampling(6), 0, 2e9)
    held = {"r": Request.of(Item(b"", {}, "ack", 12345, 1, 0.0), work, "queue")}
    with running_broker() as broker:
        operator, scheduler = await connect_service(broker), await connect_role(broker, "scheduler")
        callbacks: list[Callable[[], None]] = []
        monkeypatch.setattr(scheduler, "on_reconnect", callbacks.append)
        restorer = ItemRestorer(scheduler, MODEL, "sched", held)
        for callback in callbacks if reconnects else ():
            callback()
        running = asyncio.create_task(restorer.run())
        await until(lambda: held["r"].number != 12345 or running.done())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        (item,) = await operator.store.pull_work(OWN, 1, expires=5)
        assert item.number == held["r"].number
        assert held["r"].queue == OWN, "so that it does not hide one that stands in the first queue"
        for bus in (operator, scheduler):
            await bus.close()
