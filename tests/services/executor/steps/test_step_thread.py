"""One thread opens the device, steps, and closes it."""

import asyncio
import gc
import threading
from pathlib import Path

import pytest

from pagewire.services.executor.devices.protocol import StepBatch
from pagewire.services.executor.outputs.results import PlanRefused, StepResult
from pagewire.services.executor.steps import step_thread
from pagewire.services.executor.steps.plan_inbox import PlanInbox
from pagewire.services.executor.steps.step_thread import DeviceThread
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Settings
from tests.services.executor.fakes import PATIENCE, FakeDevice, FakePending, add, plan, sampling


class Placed(FakeDevice):
    """Remembers the threads that it is called on."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = [threading.get_ident()]

    def launch(self, batch: StepBatch) -> FakePending:
        self.threads.append(threading.get_ident())
        return super().launch(batch)

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        super().close()


@pytest.mark.anyio
async def test_all_calls_of_the_device_are_made_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Placed] = []

    def open_placed(settings: Settings, folder: Path) -> Placed:
        devices.append(Placed())
        return devices[0]

    monkeypatch.setattr(step_thread, "open_device", open_placed)

    inbox, results = PlanInbox(), asyncio.Queue[StepResult | PlanRefused]()
    async with asyncio.timeout(PATIENCE):
        device = await DeviceThread.open(Settings(model="bundled", device="cpu"), inbox, results.put_nowait)
        inbox.begin(1)
        inbox.put(plan(1, add(0, 7, [1], [0], picks=sampling(max_tokens=2))))
        await results.get()
        await results.get()
        assert gc.get_freeze_count() > 0
        await device.close()
    assert devices[0].closed
    assert len(devices[0].threads) == 4
    assert len(set(devices[0].threads)) == 1
    assert devices[0].threads[0] != threading.get_ident()
    assert gc.get_freeze_count() == 0


@pytest.mark.anyio
async def test_a_device_that_cannot_be_opened_raises_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Settings, folder: Path) -> FakeDevice:
        raise ConfigurationError("no such device")

    monkeypatch.setattr(step_thread, "open_device", refuse)
    with pytest.raises(ConfigurationError, match="no such device"):
        await DeviceThread.open(Settings(model="bundled", device="cpu"), PlanInbox(), print)


@pytest.mark.anyio
async def test_a_failing_step_is_raised_and_the_device_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice()
    fake.failing = True
    monkeypatch.setattr(step_thread, "open_device", lambda settings, folder: fake)

    inbox = PlanInbox()
    device = await DeviceThread.open(Settings(model="bundled", device="cpu"), inbox, print)
    inbox.begin(1)
    inbox.put(plan(1, add(0, 7, [1], [0])))
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(RuntimeError, match="on fire"):
            await device.failure()
        await device.close()
    assert fake.closed


@pytest.mark.anyio
async def test_closing_waits_for_the_step_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(gated=True)
    monkeypatch.setattr(step_thread, "open_device", lambda settings, folder: fake)

    async def end_the_step() -> None:
        fake.allow()

    inbox, results = PlanInbox(), asyncio.Queue[StepResult | PlanRefused]()
    async with asyncio.timeout(PATIENCE):
        device = await DeviceThread.open(Settings(model="bundled", device="cpu"), inbox, results.put_nowait)
        inbox.begin(1)
        inbox.put(plan(1, add(0, 7, [1], [0])))
        assert await asyncio.to_thread(fake.entered.acquire, timeout=PATIENCE)
        await asyncio.gather(device.close(), end_the_step())  # begun in this order, so that no other step begins
        assert len(fake.batches) == 1
        assert isinstance(await results.get(), StepResult)
