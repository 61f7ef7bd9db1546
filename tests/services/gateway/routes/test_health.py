import pytest

from pagewire.services.gateway.routes.health import REQUIRED, Health
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import ModelNotFound
from pagewire.shared.messages import encode
from pagewire.shared.messages.client import ModelInfo
from pagewire.shared.messages.heartbeat import UNLOADED, Heartbeat

pytestmark = pytest.mark.anyio


async def test_a_services_problem_is_named_until_one_instance_is_well() -> None:
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


class Models:
    """Services of several models, whose heartbeats reach a health."""

    def __init__(self, *, awaited: tuple[str, ...] = ()) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.health = Health(self.bus, lambda: None, awaited)

    async def beat(self, model: str, *, ready: bool = True, services: tuple[str, ...] = REQUIRED) -> None:
        infos = (ModelInfo(model, "", 96, "", root=model), ModelInfo(f"{model}-alias", "", 96, "", root=model))
        for service in services:
            models = infos if service == "tokenizer" else ()
            beat = Heartbeat(service, f"{service}{model}", ready, 0, 0, 0, {}, model=model, models=models)
            self.bus.publish(f"{subjects.HEARTBEAT}.{service}.{service}{model}", encode(beat))
        await self.bus.flush()


async def test_the_gateway_is_healthy_while_one_model_is_served() -> None:
    models = Models()
    await models.health.listen()
    await models.beat("a")
    await models.beat("b", ready=False)
    assert models.health.missing() == ""
    assert models.health.reasons() == {"a": "", "b": "no tokenizer is ready"}
    assert models.health.missing_of("a-alias") == ""
    assert models.health.missing_of("b-alias") == "no tokenizer is ready"
    with pytest.raises(ModelNotFound):
        models.health.missing_of("c")
    await models.beat("a", ready=False)
    assert models.health.missing() == "a: no tokenizer is ready; b: no tokenizer is ready"


async def test_all_models_are_awaited_at_the_start_alone() -> None:
    models = Models(awaited=("a", "b"))
    await models.health.listen()
    await models.beat("a")
    assert models.health.missing() == "b: no tokenizer is running"
    await models.beat("b")
    assert models.health.missing() == ""
    await models.beat("b", ready=False, services=("scheduler",))
    assert models.health.missing() == ""
    assert models.health.missing_of("b") == "no scheduler is ready"


async def test_an_unloaded_model_is_healthy_and_its_executor_is_no_instance() -> None:
    bus = MemoryBus(MemoryBroker())
    health = Health(bus, lambda: None)
    await health.listen()
    for service in (*REQUIRED, "executor"):
        load = {UNLOADED: 1.0} if service in ("scheduler", "executor") else {}
        beat = Heartbeat(service, service, service not in ("scheduler", "executor"), 0, 0, 0, load)
        bus.publish(f"{subjects.HEARTBEAT}.{service}.{service}", encode(beat))
    await bus.flush()
    assert health.missing() == ""
    assert {beat.service for beat in health.alive()} == set(REQUIRED)
    await bus.close()
