"""A clock that differs from the broker's is measured, and logged once for each change."""

import asyncio

import pytest
from structlog.testing import capture_logs

from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.memory_store import MemoryStore
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.process import clock_monitor
from pagewire.shared.process.clock_monitor import ClockMonitor
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_a_wrong_clock_is_measured_and_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_monitor, "INTERVAL", 0.01)
    monkeypatch.setattr(clock_monitor, "RETRY_INTERVAL", 0.01)
    offsets = [None, 0.2, 600.0, 600.3, -600.0]
    read: list[float | None] = []

    async def read_clock(_: MemoryStore) -> float:
        read.append(offsets[min(len(read), len(offsets) - 1)])
        if (offset := read[-1]) is None:
            raise BusUnavailable("there is no broker")
        return offset

    monkeypatch.setattr(MemoryStore, "read_clock", read_clock)
    monitor = ClockMonitor(MemoryBus(MemoryBroker()).store)
    assert not list(monitor.metrics()), "nothing is known"
    with capture_logs() as lines:
        running = asyncio.create_task(monitor.run())
        await until(lambda: len(read) > len(offsets))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [line["broker_ahead_s"] for line in lines] == [600.0, -600.0]
    assert [sample.value for sample in monitor.metrics()] == [-600.0]
