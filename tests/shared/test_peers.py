import pytest

from pagewire.shared import peers, subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.peers import Peers
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
