import pytest

from pagewire.services.gateway.routes.health import REQUIRED, Health
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat

pytestmark = pytest.mark.anyio


async def test_the_problem_of_a_service_is_named_until_one_instance_has_none() -> None:
    bus = MemoryBus(MemoryBroker())
    changes: list[str] = []
    health = Health(bus, lambda: changes.append(health.missing()))
    await health.listen()

    async def beat(service: str, instance: str, *, refuses: bool = False) -> None:
        heartbeat = Heartbeat(
            service, instance, not refuses, 0, 0, 0, {}, problem="the store is full" if refuses else ""
        )
        bus.publish(f"{subjects.HEARTBEAT}.{service}.{instance}", encode(heartbeat))
        await bus.flush()

    for service in REQUIRED:
        await beat(service, service)
    assert changes == [""]
    await beat("tokenizer", "tokenizer", refuses=True)
    assert health.missing() == "the store is full"
    await beat("tokenizer", "another")
    assert health.missing() == ""
    assert [bool(change) for change in changes] == [False, True, False]
    await bus.close()
