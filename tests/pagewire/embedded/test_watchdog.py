import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagewire.embedded import watchdog
from pagewire.embedded.broker import Broker
from pagewire.embedded.watchdog import Watchdog
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.heartbeat import Heartbeat
from tests.support.broker import connect_role
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SILENCE", 0.05)
    monkeypatch.setattr(watchdog, "PING_TIMEOUT", 0.05)
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL", 0.01)


class Fake:
    """Services whose heartbeats and answers to pings a test decides."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker)

    def beat(self, name: str, instance: str, *, ready: bool = True, **load: float) -> None:
        beat = Heartbeat(name, instance, ready, term=0, plan=0, step=0, load=load)
        self.bus.publish(f"{subjects.HEARTBEAT}.{name}.{instance}", encode(beat))

    async def subscribe_to_pings(self, name: str, instance: str, *, answer: bool) -> None:
        def reply(message: Any) -> None:
            if answer:
                self.bus.publish(message.reply, b"{}")

        await self.bus.subscribe(f"$SRV.PING.pagewire-{name}.{instance}", reply)


@pytest.fixture
def memory() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def fake(memory: MemoryBroker) -> Fake:
    return Fake(memory)


@pytest.fixture
def instances() -> dict[str, str]:
    return {"executor": "e1", "scheduler": "s1"}


@pytest.fixture
def killed() -> list[str]:
    """Names of the killed programs."""
    return []


class CoreClock:
    """Counts the time in which a program waits for a core, by the program's name; a test begins and ends the wait.

    Attributes:
        computing: names of the programs that compute.
    """

    def __init__(self) -> None:
        self.computing: set[str] = set()
        self._since: dict[str, float] = {}
        self._waited: dict[str, float] = {}

    def begin(self, name: str) -> None:
        self._since[name] = time.monotonic()

    def end(self, name: str) -> None:
        self._waited[name] = self.wait_of(name)
        del self._since[name]

    def wait_of(self, name: str) -> float:
        now = time.monotonic()
        return self._waited.get(name, 0.0) + now - self._since.get(name, now)

    def computed_by(self, name: str) -> float:
        return time.monotonic() if name in self.computing else 0.0


@dataclass
class Programs:
    """Programs whose ends and times a test observes and decides."""

    instances: dict[str, str]
    killed: list[str]
    cores: CoreClock = field(default_factory=CoreClock)

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def replace(self, name: str, instance: str) -> None:
        """No test has a program that drains."""

    def seconds_without_core(self, name: str) -> float:
        return self.cores.wait_of(name)

    def cpu_seconds(self, name: str) -> float:
        return self.cores.computed_by(name)


@pytest.fixture
def cores() -> CoreClock:
    return CoreClock()


@pytest.fixture(autouse=True)
async def watched(
    memory: MemoryBroker, instances: dict[str, str], killed: list[str], cores: CoreClock
) -> AsyncIterator[Watchdog]:
    bus = MemoryBus(memory, inbox_prefix="_INBOX")
    watched = Watchdog(bus, Programs(instances, killed, cores))
    await watched.listen()
    running = asyncio.create_task(watched.run())
    yield watched
    running.cancel()


async def test_the_stack_is_ready_once_every_service_is(watched: Watchdog, fake: Fake) -> None:
    waiting = asyncio.create_task(watched.all_ready(["executor", "scheduler"]))
    fake.beat("executor", "e1", port=7.0)
    fake.beat("scheduler", "s1", ready=False)
    fake.beat("scheduler", "stranger")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    fake.beat("scheduler", "s1")
    assert (await waiting)["executor"] == {"port": 7.0}


async def test_only_heartbeats_after_a_given_time_count(watched: Watchdog, fake: Fake) -> None:
    fake.beat("executor", "e1")
    await watched.all_ready(["executor"])
    waiting = asyncio.create_task(watched.all_ready(["executor"], since=time.monotonic()))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    fake.beat("executor", "e1")
    await waiting


async def test_a_silent_service_that_answers_no_ping_is_killed(fake: Fake, killed: list[str]) -> None:
    await fake.subscribe_to_pings("executor", "e1", answer=False)
    fake.beat("executor", "e1")
    await until(lambda: killed == ["executor"])


async def test_a_frozen_replica_is_killed_by_the_name_of_its_program(
    fake: Fake, instances: dict[str, str], killed: list[str]
) -> None:
    instances |= {"executor-0": "e1", "executor-1": "e2"}
    del instances["executor"]
    await fake.subscribe_to_pings("executor", "e1", answer=True)
    await fake.subscribe_to_pings("executor", "e2", answer=False)
    fake.beat("executor", "e1")
    fake.beat("executor", "e2")
    await until(lambda: killed == ["executor-1"])


async def test_a_silent_service_that_answers_a_ping_lives(fake: Fake, killed: list[str]) -> None:
    await fake.subscribe_to_pings("executor", "e1", answer=True)
    fake.beat("executor", "e1")
    await asyncio.sleep(0.3)
    assert killed == []


async def test_a_service_that_waits_for_a_core_lives_and_others_know_it(
    memory: MemoryBroker, fake: Fake, killed: list[str], cores: CoreClock
) -> None:
    repeated: list[Heartbeat] = []

    def on_heartbeat(message: Message) -> None:
        beat = Decoder(Heartbeat).decode(message.data)
        if beat.repeated:
            repeated.append(beat)

    await MemoryBus(memory).subscribe(f"{subjects.HEARTBEAT}.executor.e1", on_heartbeat)
    await fake.subscribe_to_pings("executor", "e1", answer=False)
    fake.beat("executor", "e1", port=7.0)
    cores.begin("executor")
    await until(lambda: len(repeated) >= 20)  # ten times as many checks as the silence lasts
    assert killed == []
    assert repeated[-1].load == {"port": 7.0}


async def test_a_starved_service_that_is_stopped_is_killed(fake: Fake, killed: list[str], cores: CoreClock) -> None:
    await fake.subscribe_to_pings("executor", "e1", answer=False)
    fake.beat("executor", "e1")
    cores.begin("executor")
    await asyncio.sleep(0.2)
    assert killed == []
    cores.end("executor")
    await until(lambda: killed == ["executor"])


async def test_a_silent_service_lives_while_it_computes_to_become_ready(
    fake: Fake, killed: list[str], cores: CoreClock
) -> None:
    cores.computing = {"executor", "scheduler"}
    await fake.subscribe_to_pings("executor", "e1", answer=False)
    await fake.subscribe_to_pings("scheduler", "s1", answer=False)
    fake.beat("executor", "e1", ready=False)
    fake.beat("scheduler", "s1")
    await until(lambda: "scheduler" in killed)  # it is ready, so it must say so
    assert "executor" not in killed
    cores.computing.clear()
    await until(lambda: "executor" in killed)


async def test_a_service_that_waits_for_no_core_gets_no_heartbeat_of_the_watchdog(
    fake: Fake, memory: MemoryBroker
) -> None:
    await fake.subscribe_to_pings("executor", "e1", answer=True)
    heartbeats: list[Message] = []
    await MemoryBus(memory).subscribe(f"{subjects.HEARTBEAT}.executor.e1", heartbeats.append)
    fake.beat("executor", "e1")
    await asyncio.sleep(0.2)
    assert len(heartbeats) == 1


async def test_a_service_that_was_frozen_while_the_broker_restarted_is_killed(
    killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restarted broker answers that nobody subscribes to the pings of the service."""
    monkeypatch.setattr(watchdog, "RECONNECT_TIMEOUT", 0.2)
    async with Broker(port=0) as broker:
        bus, service = await connect_role(broker, "supervisor"), await connect_role(broker, "executor")
        watched = Watchdog(bus, Programs({"executor": "e1"}, killed))
        await watched.listen()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(watched.run())
            beat = Heartbeat("executor", "e1", True, term=0, plan=0, step=0, load={})
            service.publish(f"{subjects.HEARTBEAT}.executor.e1", encode(beat))
            await watched.all_ready(["executor"])
            await service.close()  # a frozen process does not connect again either
            os.kill(broker.pid, signal.SIGKILL)
            await broker.wait()
            await broker.start()
            await until(lambda: "executor" in killed)
            running.cancel()
        await bus.close()


async def test_services_may_connect_again_later_than_the_watchdog(
    memory: MemoryBroker, killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "RECONNECT_TIMEOUT", 1.0)
    bus = MemoryBus(memory)
    reconnected: list[Callable[[], None]] = []
    monkeypatch.setattr(bus, "on_reconnect", reconnected.append)
    watched = Watchdog(bus, Programs({"executor": "e3"}, killed))
    await watched.listen()
    running = asyncio.create_task(watched.run())
    Fake(memory).beat("executor", "e3")
    began = time.monotonic()
    while time.monotonic() - began < 1.3:
        reconnected[0]()
        await asyncio.sleep(0.01)
    assert killed == []
    await until(lambda: "executor" in killed)
    running.cancel()


async def test_a_service_that_has_gone_or_is_still_starting_is_left_alone(
    fake: Fake, instances: dict[str, str], killed: list[str]
) -> None:
    fake.beat("executor", "e1")
    await asyncio.sleep(0.2)
    instances["executor"] = "e2"
    await fake.subscribe_to_pings("executor", "e2", answer=False)
    await asyncio.sleep(0.2)
    assert killed == []
