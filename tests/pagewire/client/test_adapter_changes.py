"""A change of an adapter is made whatever executor dies, and refused at once where none serves adapters."""

import asyncio

import pytest

from pagewire.client import adapter_changes
from pagewire.client.adapter_changes import change_adapter
from pagewire.client.directory import Directory
from pagewire.shared import subjects
from pagewire.shared.bus import Message, Subscription
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.client_protocol.frame_encoding import encode_frame, error_frame, error_headers
from pagewire.shared.errors import InvalidRequest, ModelNotFound, Unavailable
from pagewire.shared.messages.adapters import AdapterReply, LoadAdapterRequest, UnloadAdapterRequest
from pagewire.shared.messages.open import Encoding
from tests.support.responder import MODEL, Responder
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

LOAD, UNLOAD = LoadAdapterRequest("sql", "/adapters/sql"), UnloadAdapterRequest("sql")


class Executor:
    """Answers requests of adapters. The first `lost` of them are served, and their answers are lost."""

    def __init__(self, bus: MemoryBus, lost: int = 0) -> None:
        self.bus, self.lost = bus, lost
        self.loaded = False
        self.requests = 0
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        pattern = f"{subjects.ADAPTERS}.*.{MODEL}"
        self._subscriptions = [await self.bus.subscribe(pattern, self._serve)]

    async def end(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def _serve(self, message: Message) -> None:
        self.requests += 1
        absent = ".unload." in message.subject and not self.loaded
        self.loaded = ".load." in message.subject
        if self.requests <= self.lost:
            return
        if absent:
            error = ModelNotFound("there is no adapter sql")
            body = encode_frame(error_frame(error, ""), Encoding.JSON)
            self.bus.publish(message.reply, body, headers=error_headers(error))
        else:
            self.bus.publish(message.reply, encode_frame(AdapterReply("sql", "0f"), Encoding.JSON))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_changes, "TIMEOUTS", (0.05, 60.0))
    monkeypatch.setattr(adapter_changes, "RESEND_INTERVAL", 0.01)


async def parts(lost: int = 0) -> tuple[MemoryBus, Directory, Executor]:
    broker = MemoryBroker()
    await Responder(MemoryBus(broker)).start()
    bus = MemoryBus(broker, inbox_prefix="_INBOX")
    return bus, Directory(bus), Executor(MemoryBus(broker), lost)


async def test_without_an_executor_that_serves_adapters_a_change_is_refused_at_once() -> None:
    bus, directory, _ = await parts()
    with pytest.raises(InvalidRequest, match="enable-lora"):
        await change_adapter(bus, directory, MODEL, LOAD)


async def test_a_change_waits_for_executors_that_all_restart() -> None:
    bus, directory, executor = await parts()
    await executor.start()
    await change_adapter(bus, directory, MODEL, LOAD)
    await executor.end()
    change = asyncio.create_task(change_adapter(bus, directory, MODEL, UNLOAD))
    await asyncio.sleep(0)
    await executor.start()
    assert (await change).digest == "0f"


async def test_a_change_whose_executors_stay_away_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_changes, "RETRY_FOR", 0.05)
    bus, directory, executor = await parts()
    directory.adapted.add(MODEL)
    with pytest.raises(Unavailable):
        await change_adapter(bus, directory, MODEL, LOAD)
    assert executor.requests == 0


@pytest.mark.parametrize("change", [LOAD, UNLOAD], ids=["load", "unload"])
async def test_a_change_whose_answer_is_lost_with_its_executor_has_been_made(
    change: LoadAdapterRequest | UnloadAdapterRequest,
) -> None:
    bus, directory, executor = await parts(lost=1)
    executor.loaded = True
    await executor.start()
    await change_adapter(bus, directory, MODEL, change)
    await until(lambda: executor.requests == 2)
    assert executor.loaded == (change is LOAD)


async def test_an_adapter_that_was_never_there_is_not_found() -> None:
    bus, directory, executor = await parts()
    await executor.start()
    with pytest.raises(ModelNotFound):
        await change_adapter(bus, directory, MODEL, UNLOAD)
