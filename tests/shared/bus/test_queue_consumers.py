"""What a cluster does not answer about a consumer, since it has no leader."""

from typing import Any

import msgspec
import pytest
from typing_extensions import override

from pagewire.shared.bus import Headers, Message
from pagewire.shared.bus.jetstream import NotNow
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.queue_consumers import QueueConsumers
from pagewire.shared.errors import RequestTimeout

pytestmark = pytest.mark.anyio

QUEUE = "m.9.normal.any"


NOT_NOW = {"error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}


class Answering(MemoryBus):
    """A connection to servers that give the same answer to each call of some names, and to the others none."""

    def __init__(self, **answers: dict[str, Any]) -> None:
        super().__init__(MemoryBroker())
        self.answers = answers
        self.calls: list[str] = []

    @override
    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        name = subject.split(".")[3]
        self.calls.append(name)
        if name not in self.answers:
            raise RequestTimeout(subject)
        return Message(subject, msgspec.json.encode(self.answers[name]))


def consumers(bus: MemoryBus, replicas: int) -> QueueConsumers:
    async def restore(subject: str) -> None:
        raise AssertionError(subject)

    return QueueConsumers(bus, replicas, restore)


async def test_a_consumer_of_a_cluster_that_does_not_answer_has_no_leader() -> None:
    info = await consumers(Answering(), 3).info(QUEUE)
    assert info.leaderless


async def test_the_only_server_must_answer() -> None:
    queues = consumers(Answering(), 1)
    for call in (queues.info, queues.create):
        with pytest.raises(RequestTimeout):
            await call(QUEUE)


async def test_a_consumer_that_was_deleted_without_an_answer_is_created_again() -> None:
    bus = Answering(CREATE={})
    queues = consumers(bus, 3)
    for _ in range(2):
        await queues.create(QUEUE)
    await queues.delete(QUEUE)
    await queues.create(QUEUE)
    assert bus.calls == ["CREATE", "DELETE", "CREATE"]


async def test_a_cluster_without_a_leader_has_not_deleted_a_consumer() -> None:
    with pytest.raises(NotNow):
        await consumers(Answering(DELETE=NOT_NOW), 3).delete(QUEUE)


@pytest.mark.parametrize("answers", [{}, {"CREATE": NOT_NOW}])
async def test_a_queue_is_pulled_while_its_cluster_has_no_leader(answers: dict[str, Any]) -> None:
    """The consumer, which has a leader of its own, may be there."""
    bus = Answering(**answers)
    queues = consumers(bus, 3)
    for _ in range(2):
        await queues.create(QUEUE)
    assert bus.calls == ["CREATE"]


async def test_each_queue_is_forgotten_alone() -> None:
    bus = Answering(CREATE={})
    queues = consumers(bus, 3)
    for queue in (QUEUE, "m.9.urgent.any"):
        await queues.create(queue)
    queues.forget(QUEUE)
    for queue in (QUEUE, "m.9.urgent.any"):
        await queues.create(queue)
    assert bus.calls == ["CREATE"] * 3
