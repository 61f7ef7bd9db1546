import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pagewire.embedded import watchdog
from pagewire.embedded.watchdog import Watchdog
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SILENCE", 0.05)
    monkeypatch.setattr(watchdog, "PING_TIMEOUT", 0.05)
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL", 0.01)


class Fake:
    """Services that beat and answer pings as a test wants."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker)

    def beat(self, name: str, instance: str, *, ready: bool = True, **load: float) -> None:
        beat = Heartbeat(name, instance, ready, term=0, plan=0, step=0, load=load)
        self.bus.publish(f"{subjects.HEARTBEAT}.{name}.{instance}", encode(beat))

    async def hear_pings(self, name: str, instance: str, *, answer: bool) -> None:
        def reply(message: Any) -> None:
            if answer:
                self.bus.publish(message.reply, b"{}")

        await self.bus.subscribe(f"$SRV.PING.pagewire-{name}.{instance}", reply)


def play(scenario: Callable[[Watchdog, Fake, dict[str, str], list[str]], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        instances = {"executor": "e1", "scheduler": "s1"}
        killed: list[str] = []
        dog = Watchdog(MemoryBus(broker, inbox_prefix="_INBOX"), instances, killed.append)
        await dog.listen()
        running = asyncio.create_task(dog.run())
        try:
            async with asyncio.timeout(5):
                await scenario(dog, Fake(broker), instances, killed)
        finally:
            running.cancel()

    asyncio.run(main())


def test_ready_once_every_service_says_so() -> None:
    async def scenario(dog: Watchdog, fake: Fake, instances: dict[str, str], killed: list[str]) -> None:
        waiting = asyncio.create_task(dog.all_ready(["executor", "scheduler"]))
        fake.beat("executor", "e1", port=7.0)
        fake.beat("scheduler", "s1", ready=False)
        fake.beat("scheduler", "stranger")
        await asyncio.sleep(0.01)
        assert not waiting.done()
        fake.beat("scheduler", "s1")
        assert (await waiting)["executor"] == {"port": 7.0}

    play(scenario)


def test_a_silent_service_that_answers_no_ping_is_killed() -> None:
    async def scenario(dog: Watchdog, fake: Fake, instances: dict[str, str], killed: list[str]) -> None:
        await fake.hear_pings("executor", "e1", answer=False)
        fake.beat("executor", "e1")
        await until(lambda: killed == ["executor"])

    play(scenario)


def test_a_frozen_replica_is_killed_by_the_name_of_its_program() -> None:
    async def scenario(dog: Watchdog, fake: Fake, instances: dict[str, str], killed: list[str]) -> None:
        instances |= {"executor-0": "e1", "executor-1": "e2"}
        del instances["executor"]
        await fake.hear_pings("executor", "e1", answer=True)
        await fake.hear_pings("executor", "e2", answer=False)
        fake.beat("executor", "e1")
        fake.beat("executor", "e2")
        await until(lambda: killed == ["executor-1"])

    play(scenario)


def test_a_silent_service_that_answers_lives() -> None:
    async def scenario(dog: Watchdog, fake: Fake, instances: dict[str, str], killed: list[str]) -> None:
        await fake.hear_pings("executor", "e1", answer=True)
        fake.beat("executor", "e1")
        await asyncio.sleep(0.3)
        assert killed == []

    play(scenario)


def test_a_service_that_has_gone_or_is_still_starting_is_left_alone() -> None:
    async def scenario(dog: Watchdog, fake: Fake, instances: dict[str, str], killed: list[str]) -> None:
        fake.beat("executor", "e1")
        await asyncio.sleep(0.2)
        instances["executor"] = "e2"
        await fake.hear_pings("executor", "e2", answer=False)
        await asyncio.sleep(0.2)
        assert killed == []

    play(scenario)
