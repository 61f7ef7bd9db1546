import pytest

from pagewire.services.scheduler.step_readers import Readers
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process import peers
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def beat(bus: MemoryBus, instance: str, term: int, step: int, service: str = "detokenizer") -> None:
    data = encode(Heartbeat(service, instance, True, term, 0, step, {}, {term: step, term + 10: 2 * step}))
    bus.publish(f"{subjects.HEARTBEAT}.{service}.{instance}", data)


async def test_the_slowest_reader_of_the_term_counts() -> None:
    bus = MemoryBus(MemoryBroker())
    heard: list[int] = []
    found = Readers(bus, lambda: heard.append(1))
    await found.listen()
    assert found.slowest(7) is None
    beat(bus, "a", 7, 100)
    beat(bus, "b", 7, 40)
    beat(bus, "c", 6, 1)
    beat(bus, "executor", 7, 0, service="executor")
    await until(lambda: len(heard) == 3)
    assert found.slowest(7) == 40
    assert found.slowest(17) == 80, "a detokenizer reads the steps of every replica"
    assert found.slowest(8) is None
    beat(bus, "b", 7, 90)
    await until(lambda: len(heard) == 4)
    assert found.slowest(7) == 90


async def test_a_silent_reader_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus(MemoryBroker())
    heard: list[int] = []
    found = Readers(bus, lambda: heard.append(1))
    await found.listen()
    beat(bus, "a", 7, 1)
    bus.publish(f"{subjects.HEARTBEAT}.detokenizer.b", b"nonsense")
    await until(lambda: len(heard) == 1)
    assert found.slowest(7) == 1
    monkeypatch.setattr(peers, "SILENCE", 0.0)
    assert found.slowest(7) is None
