import pytest

from pagewire.services.gateway.routes.health import REQUIRED, Health
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import STORE_REFUSES, Heartbeat

pytestmark = pytest.mark.anyio


async def test_a_store_that_refuses_is_named_until_one_tokenizer_can_store() -> None:
    bus = MemoryBus(MemoryBroker())
    changes: list[str] = []
    health = Health(bus, lambda: changes.append(health.missing()))
    await health.listen()

    async def beat(service: str, instance: str, *, refuses: bool = False) -> None:
        load = {STORE_REFUSES: float(refuses)} if service == "tokenizer" else {}
        heartbeat = Heartbeat(service, instance, not refuses, 0, 0, 0, load)
        bus.publish(f"{subjects.HEARTBEAT}.{service}.{instance}", encode(heartbeat))
        await bus.flush()

    for service in REQUIRED:
        await beat(service, service)
    assert changes == [""]
    await beat("tokenizer", "tokenizer", refuses=True)
    assert "store" in health.missing()
    await beat("tokenizer", "another")
    assert health.missing() == ""
    assert [bool(change) for change in changes] == [False, True, False]
    await bus.close()
