"""A request that is held has an item in the store, whatever an administrator or a disk has done to the first one."""

import pytest

from pagewire.services.scheduler import item_restorer
from pagewire.shared import subjects
from tests.services.scheduler.test_service import MODEL, Scene, scene
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
