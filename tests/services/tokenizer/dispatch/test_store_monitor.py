import asyncio
from collections.abc import AsyncIterator

import pytest

from pagewire.services.tokenizer.dispatch import store_monitor
from pagewire.services.tokenizer.dispatch.store_monitor import StoreMonitor
from pagewire.shared.errors import BusError, ConnectionLost, RequestTimeout, StorageRefused
from tests.support.switched_store import SwitchedStore
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Watched(StoreMonitor):
    """A monitor that notes its changes."""

    def __init__(self, store: SwitchedStore) -> None:
        super().__init__(store, lambda: self.changes.append(self.refusal))
        self.changes: list[str] = []
        self.store = store

    async def checked(self) -> None:
        """Returns when the store was checked twice more, so once with what it says now."""
        before = self.store.attempts
        await until(lambda: self.store.attempts >= before + 2)


@pytest.fixture
async def monitor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(store_monitor, "INTERVAL", 0.01)
    monitor = Watched(SwitchedStore())
    running = asyncio.create_task(monitor.run())
    yield monitor
    running.cancel()
    await asyncio.wait({running})


async def test_a_change_of_the_store_is_reported_once(monitor: Watched) -> None:
    await monitor.checked()
    monitor.store.refusal = StorageRefused("x", "insufficient resources")
    await monitor.checked()
    await monitor.checked()
    monitor.store.refusal = None
    await monitor.checked()
    assert monitor.changes == ["insufficient resources", ""]


@pytest.mark.parametrize(
    ("error", "refusal"), [(RequestTimeout("no reply"), "no answer"), (ConnectionLost("no connection"), "")]
)
async def test_a_silent_store_refuses_and_a_lost_connection_does_not(
    monitor: Watched, error: BusError, refusal: str
) -> None:
    monitor.store.refusal = error
    await monitor.checked()
    assert monitor.refusal == refusal
