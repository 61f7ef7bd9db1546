import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pagewire.services.scheduler import bulletin
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.prefixes import CachedPrefixes
from tests.support.waiting import until

EMPTY, FULL = CachedPrefixes("s", 8, b""), CachedPrefixes("s", 8, b"1234")


class Scene:
    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.current: CachedPrefixes | None = EMPTY
        self.asked = 0
        self.told: list[CachedPrefixes] = []

    def ask(self) -> CachedPrefixes | None:
        self.asked += 1
        return self.current

    def hear(self, message: Message) -> None:
        self.told.append(Decoder(CachedPrefixes).decode(message.data))


def play(monkeypatch: pytest.MonkeyPatch, test: Callable[[Scene], Awaitable[None]]) -> None:
    monkeypatch.setattr(bulletin, "EVERY", 0.001)

    async def main() -> None:
        scene = Scene()
        await scene.bus.subscribe("told", scene.hear)
        telling = asyncio.create_task(bulletin.publish(scene.bus, "told", scene.ask))
        try:
            await test(scene)
        finally:
            telling.cancel()
            await asyncio.wait({telling})

    asyncio.run(main())


def test_changes_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene) -> None:
        await until(lambda: scene.asked > 5)
        scene.current = None
        asked = scene.asked
        await until(lambda: scene.asked > asked + 5)
        scene.current = FULL
        asked = scene.asked
        await until(lambda: scene.asked > asked + 5)
        assert scene.told == [EMPTY, FULL]

    play(monkeypatch, test)


def test_tokenizers_that_come_later_hear_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulletin, "AGAIN", 0.0)

    async def test(scene: Scene) -> None:
        await until(lambda: len(scene.told) > 3)
        assert set(scene.told) == {EMPTY}

    play(monkeypatch, test)


def test_what_could_not_be_sent_is_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene) -> None:
        await until(lambda: scene.told == [EMPTY])
        publish, failed = scene.bus.publish, []

        def fail(subject: str, data: bytes) -> None:
            failed.append(data)
            raise BusUnavailable("closed")

        monkeypatch.setattr(scene.bus, "publish", fail)
        scene.current = FULL
        await until(lambda: failed)
        monkeypatch.setattr(scene.bus, "publish", publish)
        await until(lambda: scene.told == [EMPTY, FULL])

    play(monkeypatch, test)
