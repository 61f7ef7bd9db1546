"""The keeper says what is wrong with the store for as long as it is wrong."""

import asyncio

import pytest
from typing_extensions import override

from pagewire.shared.bus.memory_store import MemoryStore
from pagewire.shared.errors import BusError, RequestTimeout, StorageRefused
from pagewire.shared.process import store_keeper
from pagewire.shared.process.store_keeper import StoreKeeper
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Changed(MemoryStore):
    """A store whose streams somebody has changed, as the test says."""

    def __init__(self) -> None:
        super().__init__(max_payload=1 << 20, ack_wait=2, done_age=120)
        self.error: BusError | None = None
        self.looks = 0

    @override
    async def mend(self) -> list[str]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return ["a stream was deleted"]


async def test_a_problem_lasts_until_the_store_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_keeper, "INTERVAL", 0.001)
    store = Changed()
    keeper = StoreKeeper(store)
    running = asyncio.create_task(keeper.run())

    async def looks() -> None:
        before = store.looks
        await until(lambda: store.looks >= before + 3)

    await looks()
    assert keeper.problem == ""
    store.error = StorageRefused("a stream", "it is sealed")
    await looks()
    assert keeper.problem == "it is sealed"
    store.error = RequestTimeout("no answer")
    await looks()
    assert keeper.problem == "it is sealed", "a silent broker says nothing new"
    store.error = None
    await looks()
    assert keeper.problem == ""
    running.cancel()
