"""What a cluster does not answer about a consumer, since it has no leader."""

import msgspec
import pytest

from pagewire.shared.bus import Headers, Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.queue_consumers import LEADERLESS, QueueConsumers
from pagewire.shared.errors import RequestTimeout

pytestmark = pytest.mark.anyio

QUEUE = "m.9.normal.any"


class Silent(MemoryBus):
    """A connection to servers that answer the creation of consumers, and nothing else."""

    def __init__(self) -> None:
        super().__init__(MemoryBroker())
        self.calls: list[str] = []

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        self.calls.append(subject.split(".")[3])
        if self.calls[-1] != "CREATE":
            raise RequestTimeout(subject)
        return Message(subject, msgspec.json.encode({}))


def consumers(bus: MemoryBus, replicas: int) -> QueueConsumers:
    async def restore(subject: str) -> None:
        raise AssertionError(subject)

    return QueueConsumers(bus, replicas, restore)


async def test_a_consumer_of_a_cluster_that_does_not_answer_has_no_leader() -> None:
    info = await consumers(Silent(), 3).info(QUEUE)
    assert info == LEADERLESS


async def test_the_only_server_must_answer() -> None:
    with pytest.raises(RequestTimeout):
        await consumers(Silent(), 1).info(QUEUE)


async def test_a_consumer_that_was_deleted_without_an_answer_is_created_again() -> None:
    bus = Silent()
    queues = consumers(bus, 3)
    for _ in range(2):
        await queues.create(QUEUE)
    await queues.delete(QUEUE)
    await queues.create(QUEUE)
    assert bus.calls == ["CREATE", "DELETE", "CREATE"]
