import asyncio

import pytest

from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process import peers
from pagewire.shared.process.peers import Peers
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def beat(bus: MemoryBus, service: str, instance: str, term: int = 0) -> None:
    data = encode(Heartbeat(service, instance, True, term, 0, 0, {}))
    bus.publish(f"{subjects.HEARTBEAT}.{service}.{instance}", data)


async def test_the_last_heartbeat_of_each_instance_of_what_is_listened_to() -> None:
    bus = MemoryBus(MemoryBroker())
    received: list[int] = []
    found = Peers(bus, on_change=lambda: received.append(len(found.alive("scheduler"))))
    await found.listen("scheduler")
    await found.listen("executor")
    bus.publish(f"{subjects.HEARTBEAT}.scheduler.x", b"nonsense")
    for service, instance, term in (("scheduler", "b", 1), ("scheduler", "a", 2), ("gateway", "g", 3)):
        beat(bus, service, instance, term)
    beat(bus, "scheduler", "b", 4)
    beat(bus, "executor", "e")
    await until(lambda: len(received) == 4)
    assert received == [1, 2, 2, 2], "the callback finds the heartbeat"
    assert [(b.instance, b.term) for b in found.alive("scheduler")] == [("a", 2), ("b", 4)]
    assert found.alive("gateway") == []
    assert found.find("e") is not None


async def test_a_silent_instance_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus(MemoryBroker())
    found = Peers(bus)
    await found.listen()
    beat(bus, "scheduler", "a")
    await until(lambda: found.find("a"))
    monkeypatch.setattr(peers, "SILENCE", 0.0)
    assert found.find("a") is None
    assert found.alive("scheduler") == []


async def test_an_instance_whose_process_has_ended_is_gone_at_once() -> None:
    bus = MemoryBus(MemoryBroker())
    ended: list[str] = []
    found = Peers(bus, on_ended=ended.append)
    await found.listen()
    beat(bus, "scheduler", "a")
    beat(bus, "scheduler", "b")
    await until(lambda: found.find("b"))
    bus.publish(f"{subjects.HEARTBEAT}.scheduler.a", b"")
    beat(bus, "scheduler", "a")  # its last heartbeat, which another connection has delayed
    beat(bus, "scheduler", "c")
    await until(lambda: found.find("c"))
    assert ended == ["a"]
    assert [b.instance for b in found.alive("scheduler")] == ["b", "c"]


class TestGone:
    """What is certainly gone, for those who then take over its work."""

    async def test_a_process_that_has_ended(self) -> None:
        bus = MemoryBus(MemoryBroker())
        found = Peers(bus)
        await found.listen()
        beat(bus, "detokenizer", "a")
        await until(lambda: found.find("a"))
        assert not found.gone("a")
        bus.publish(f"{subjects.HEARTBEAT}.detokenizer.a", b"")
        await until(lambda: found.gone("a"))

    async def test_one_that_is_silent_while_others_are_heard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bus = MemoryBus(MemoryBroker())
        found = Peers(bus)
        loop = asyncio.get_running_loop()
        listened_since = loop.time()
        await found.listen()
        monkeypatch.setattr(peers, "SILENCE", 0.2)
        assert not found.gone("never-heard"), "it may not have had the time"
        while not found.gone("never-heard"):
            beat(bus, "detokenizer", "other")
            await bus.flush()
        assert loop.time() - listened_since >= 0.2
        assert not found.gone("other")

    async def test_silence_does_not_count_while_this_process_hears_nobody(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bus = MemoryBus(MemoryBroker())
        found = Peers(bus)
        await found.listen()
        beat(bus, "detokenizer", "a")
        await until(lambda: found.find("a"))
        monkeypatch.setattr(peers, "SILENCE", 0.2)
        monkeypatch.setattr(peers, "DEAF", 0.1)
        await until(lambda: found.find("a") is None)
        assert not found.gone("a"), "nobody was heard: this process or its connection may have stood still"
        beat(bus, "detokenizer", "b")
        await until(lambda: found.find("b"))
        assert not found.gone("a"), "silence counts anew"
