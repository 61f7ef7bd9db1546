"""A tokenizer that is late, or ends with a question, is asked again; and the default model is current."""

import pytest

from pagewire import AsyncClient
from pagewire.client import directory
from pagewire.client.directory import Directory
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import ConnectionLost, InvalidRequest, Unavailable
from pagewire.shared.messages.client import ModelInfo
from tests.support.responder import MODEL, Responder
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio


class Late(Responder):
    """A tokenizer that does not answer the first `lost` questions."""

    def __init__(self, bus: MemoryBus, lost: int) -> None:
        super().__init__(bus)
        self.lost = lost
        self.listings = 0

    def _models(self, message: Message) -> None:
        self.listings += 1
        if not self._loses():
            super()._models(message)

    def _tokenize(self, message: Message) -> None:
        if not self._loses():
            super()._tokenize(message)

    def _loses(self) -> bool:
        self.lost -= 1
        return self.lost >= 0


async def client_of(lost: int) -> AsyncClient:
    broker = MemoryBroker()
    await Late(MemoryBus(broker), lost).start()
    return AsyncClient(bus=MemoryBus(broker, inbox_prefix="_INBOX"))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "TIMEOUTS", (0.01, 0.02, 60.0))


async def test_models_come_from_a_tokenizer_that_was_late() -> None:
    assert [info.name for info in await (await client_of(lost=2)).models()] == [MODEL]


async def test_a_text_is_tokenized_by_a_tokenizer_that_was_late() -> None:
    assert await (await client_of(lost=2)).tokenize("a text", model=MODEL) == [100, 101, 102]


async def test_a_tokenizer_that_never_answers_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "TIMEOUTS", (0.01, 0.02))
    with pytest.raises(Unavailable, match="no tokenizer answers"):
        await (await client_of(lost=2)).models()


async def test_a_request_without_a_model_is_for_the_only_one_that_is_served_now() -> None:
    broker = MemoryBroker()
    tokenizer = await Late(MemoryBus(broker), lost=0).start()
    served = Directory(MemoryBus(broker, inbox_prefix="_INBOX"))
    assert await served.resolve("") == MODEL
    tokenizer.models = [ModelInfo("other", f"{subjects.GENERATE}.other", 64, "r1")]
    await served.models()
    assert await served.resolve("") == "other"
    tokenizer.models.append(ModelInfo(MODEL, f"{subjects.GENERATE}.{MODEL}", 64, "r1"))
    await served.models()
    with pytest.raises(InvalidRequest, match=f"name a model: this stack serves other, {MODEL}"):
        await served.resolve("")


async def test_nobody_has_to_list_the_models_for_a_request_to_find_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "FRESH_FOR", 0.0)
    broker = MemoryBroker()
    tokenizer = await Late(MemoryBus(broker), lost=0).start()
    served = Directory(MemoryBus(broker, inbox_prefix="_INBOX"))
    tenants = served.for_tenant(MemoryBus(broker, inbox_prefix="_INBOX"), "alice")
    assert [await each.resolve("") for each in (served, tenants)] == [MODEL] * 2
    tokenizer.models = [ModelInfo("other", f"{subjects.GENERATE}.other", 64, "r1")]
    assert [await each.resolve("") for each in (served, tenants)] == ["other"] * 2
    await tokenizer.leave()
    assert await served.resolve("") == "other", "its tokenizer may be restarting"
    await tokenizer.start()
    tokenizer.models.append(ModelInfo(MODEL, f"{subjects.GENERATE}.{MODEL}", 64, "r1"))
    with pytest.raises(InvalidRequest, match="name a model"):
        await served.resolve("")


async def test_a_request_does_not_wait_long_for_another_list_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "FRESH_FOR", 0.0)
    monkeypatch.setattr(directory, "LIST_TIMEOUT", 0.01)
    monkeypatch.setattr(directory, "TIMEOUTS", (PATIENCE,))
    broker = MemoryBroker()
    tokenizer = await Late(MemoryBus(broker), lost=0).start()
    served = Directory(MemoryBus(broker, inbox_prefix="_INBOX"))
    assert await served.resolve("") == MODEL
    tokenizer.lost = 1
    assert await served.resolve("") == MODEL


async def test_a_request_needs_no_other_list_where_the_connection_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent when there is a connection again."""

    async def lose(*_: object, **__: object) -> Message:
        raise ConnectionLost("the connection to the broker was lost")

    monkeypatch.setattr(directory, "FRESH_FOR", 0.0)
    broker = MemoryBroker()
    await Late(MemoryBus(broker), lost=0).start()
    bus = MemoryBus(broker, inbox_prefix="_INBOX")
    served = Directory(bus)
    assert await served.resolve("") == MODEL
    monkeypatch.setattr(bus, "request", lose)
    assert await served.resolve("") == MODEL


async def test_many_requests_share_a_list_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "FRESH_FOR", 600.0)
    broker = MemoryBroker()
    tokenizer = Late(MemoryBus(broker), lost=0)
    await tokenizer.start()
    served = Directory(MemoryBus(broker, inbox_prefix="_INBOX"))
    assert await served.resolve("named") == "named"
    assert tokenizer.listings == 0
    assert [await served.resolve("") for _ in range(20)] == [MODEL] * 20
    assert await served.for_tenant(MemoryBus(broker, inbox_prefix="_INBOX"), "alice").resolve("") == MODEL
    assert tokenizer.listings == 1
