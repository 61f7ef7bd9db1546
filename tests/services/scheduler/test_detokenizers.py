import pytest

from pagewire.services.scheduler.detokenizers import Detokenizers
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process import peers
from pagewire.shared.process.peers import Peers
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def beat(bus: MemoryBus, instance: str, term: int, step: int, service: str = "detokenizer") -> None:
    data = encode(Heartbeat(service, instance, True, term, 0, step, {}, {term: step, term + 10: 2 * step}))
    bus.publish(f"{subjects.HEARTBEAT}.{service}.{instance}", data)


async def test_the_slowest_reader_of_the_term_counts() -> None:
    bus = MemoryBus(MemoryBroker())
    beats: list[int] = []
    observer = Peers(bus)
    await observer.listen("detokenizer", lambda: beats.append(1))
    readers = Detokenizers(observer)
    assert readers.slowest_reader(7) is None
    beat(bus, "a", 7, 100)
    beat(bus, "b", 7, 40)
    beat(bus, "c", 6, 1)
    beat(bus, "executor", 7, 0, service="executor")
    await until(lambda: len(beats) == 3)
    assert readers.slowest_reader(7) == 40
    assert readers.slowest_reader(17) == 80, "a detokenizer reads the steps of every replica"
    assert readers.slowest_reader(8) is None
    beat(bus, "b", 7, 90)
    await until(lambda: len(beats) == 4)
    assert readers.slowest_reader(7) == 90


async def test_a_silent_reader_delays_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus(MemoryBroker())
    beats: list[int] = []
    observer = Peers(bus)
    await observer.listen("detokenizer", lambda: beats.append(1))
    readers = Detokenizers(observer)
    beat(bus, "a", 7, 1)
    bus.publish(f"{subjects.HEARTBEAT}.detokenizer.b", b"nonsense")
    await until(lambda: len(beats) == 1)
    assert readers.slowest_reader(7) == 1
    monkeypatch.setattr(peers, "SILENCE", 0.0)
    assert readers.slowest_reader(7) is None
