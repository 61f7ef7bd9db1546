import asyncio
import time

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


async def test_the_last_heartbeat_of_each_instance_of_a_followed_service_is_kept() -> None:
    bus = MemoryBus(MemoryBroker())
    received: list[int] = []
    observer = Peers(bus)
    await observer.listen("scheduler", lambda: received.append(len(observer.alive("scheduler"))))
    await observer.listen("executor")
    bus.publish(f"{subjects.HEARTBEAT}.scheduler.x", b"nonsense")
    for service, instance, term in (("scheduler", "b", 1), ("scheduler", "a", 2), ("gateway", "g", 3)):
        beat(bus, service, instance, term)
    beat(bus, "scheduler", "b", 4)
    beat(bus, "executor", "e")
    await until(lambda: observer.find("e"))
    assert received == [1, 2, 2], "the callback finds the heartbeat"
    assert [(b.instance, b.term) for b in observer.alive("scheduler")] == [("a", 2), ("b", 4)]
    assert observer.alive("gateway") == []
    assert observer.find("e") is not None


async def test_a_silent_instance_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus(MemoryBroker())
    observer = Peers(bus)
    await observer.listen()
    beat(bus, "scheduler", "a")
    await until(lambda: observer.find("a"))
    monkeypatch.setattr(peers, "SILENCE", 0.0)
    assert observer.find("a") is None
    assert observer.alive("scheduler") == []


async def test_a_repeated_heartbeat_keeps_an_instance_alive_and_changes_nothing() -> None:
    bus = MemoryBus(MemoryBroker())
    changes: list[int] = []
    observer = Peers(bus)
    await observer.listen(on_change=lambda: changes.append(0))
    beat(bus, "scheduler", "a", term=2)
    older = Heartbeat("scheduler", "a", True, 1, 0, 0, {}, repeated=True)
    await until(lambda: observer.find("a"))
    repeated_at = time.monotonic()
    bus.publish(f"{subjects.HEARTBEAT}.scheduler.a", encode(older))
    await until(lambda: len(changes) == 2)
    last, heard_at = observer.last("a")
    assert last is not None
    assert (last.term, last.repeated) == (2, False)
    assert heard_at >= repeated_at


async def test_an_instance_whose_process_has_ended_is_gone_at_once() -> None:
    bus = MemoryBus(MemoryBroker())
    ended: list[tuple[str, str]] = []
    observer = Peers(bus)
    await observer.listen(on_ended=lambda service, instance: ended.append((service, instance)))
    beat(bus, "scheduler", "a")
    beat(bus, "scheduler", "b")
    await until(lambda: observer.find("b"))
    bus.publish(f"{subjects.HEARTBEAT}.scheduler.a", b"")
    beat(bus, "scheduler", "a")  # its last heartbeat, which another connection has delayed
    beat(bus, "scheduler", "c")
    await until(lambda: observer.find("c"))
    assert ended == [("scheduler", "a")]
    assert [b.instance for b in observer.alive("scheduler")] == ["b", "c"]


async def test_listeners_of_a_service_share_its_heartbeats_until_they_leave() -> None:
    bus = MemoryBus(MemoryBroker())
    calls: list[str] = []
    observer = Peers(bus)
    first = await observer.listen("executor", lambda: calls.append("first"))
    await observer.listen("executor", lambda: calls.append("second"))
    beat(bus, "executor", "a")
    await until(lambda: len(calls) == 2)
    assert calls == ["first", "second"]
    await first.unsubscribe()
    beat(bus, "executor", "b")
    await until(lambda: observer.find("b"))
    assert calls == ["first", "second", "second"]


class TestGone:
    """An instance is certainly gone: others may take over its work."""

    async def test_a_process_that_has_ended_is_gone(self) -> None:
        bus = MemoryBus(MemoryBroker())
        observer = Peers(bus)
        await observer.listen()
        beat(bus, "detokenizer", "a")
        await until(lambda: observer.find("a"))
        assert not observer.gone("a")
        bus.publish(f"{subjects.HEARTBEAT}.detokenizer.a", b"")
        await until(lambda: observer.gone("a"))

    async def test_an_instance_is_gone_that_is_silent_while_others_are_heard(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bus = MemoryBus(MemoryBroker())
        observer = Peers(bus)
        loop = asyncio.get_running_loop()
        listened_since = loop.time()
        await observer.listen()
        monkeypatch.setattr(peers, "SILENCE", 0.2)
        assert not observer.gone("never-heard"), "it may not have had the time"
        while not observer.gone("never-heard"):
            beat(bus, "detokenizer", "other")
            await bus.flush()
        assert loop.time() - listened_since >= 0.2
        assert not observer.gone("other")

    async def test_silence_does_not_count_while_this_process_hears_no_instance(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bus = MemoryBus(MemoryBroker())
        observer = Peers(bus)
        await observer.listen()
        beat(bus, "detokenizer", "a")
        await until(lambda: observer.find("a"))
        monkeypatch.setattr(peers, "SILENCE", 0.2)
        monkeypatch.setattr(peers, "DEAF", 0.1)
        await until(lambda: observer.find("a") is None)
        assert not observer.gone("a"), "no instance was heard: this process or its connection may have stood still"
        beat(bus, "detokenizer", "b")
        await until(lambda: observer.find("b"))
        assert not observer.gone("a"), "silence counts anew"
