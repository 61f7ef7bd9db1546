import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagewire.services.scheduler import prefix_advertiser
from pagewire.services.scheduler.prefix_advertiser import advertise_prefixes
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.prefixes import CachedPrefixes
from tests.support.waiting import until

EMPTY, FULL = CachedPrefixes("s", 8, b""), CachedPrefixes("s", 8, b"1234")

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_advertiser, "CHECK_EVERY", 0.001)


class Scene:
    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.current: CachedPrefixes | None = EMPTY
        self.calls = 0
        self.received: list[CachedPrefixes] = []

    def ask(self) -> CachedPrefixes | None:
        self.calls += 1
        return self.current

    def receive(self, message: Message) -> None:
        self.received.append(Decoder(CachedPrefixes).decode(message.data))


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    s = Scene()
    await s.bus.subscribe("prefixes", s.receive)
    running = asyncio.create_task(advertise_prefixes(s.bus, "prefixes", s.ask))
    try:
        yield s
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_changes_are_published_once() -> None:
    async with scene() as s:
        await until(lambda: s.calls > 5)
        s.current = None
        calls = s.calls
        await until(lambda: s.calls > calls + 5)
        s.current = FULL
        again = s.calls
        await until(lambda: s.calls > again + 5)
        assert s.received == [EMPTY, FULL]


async def test_unchanged_prefixes_are_repeated_for_tokenizers_that_start_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_advertiser, "REPEAT_AFTER", 0.0)
    async with scene() as s:
        await until(lambda: len(s.received) > 3)
        assert set(s.received) == {EMPTY}


async def test_a_failed_publication_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene() as s:
        await until(lambda: s.received == [EMPTY])
        publish, failed = s.bus.publish, []

        def fail(subject: str, data: bytes) -> None:
            failed.append(data)
            raise BusUnavailable("closed")

        monkeypatch.setattr(s.bus, "publish", fail)
        s.current = FULL
        await until(lambda: failed)
        monkeypatch.setattr(s.bus, "publish", publish)
        await until(lambda: s.received == [EMPTY, FULL])
