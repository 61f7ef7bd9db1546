"""The claim of an executor, and its loss. test_service.py tests the messages between."""

import asyncio
import time
from collections import defaultdict

import msgspec
import pytest

from pagewire.services.scheduler import executor_client
from pagewire.services.scheduler.executor_client import ExecutorClient, claim_executor
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import BusError, ConnectionLost, RequestTimeout, StorageRefused
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Claim, Claimed, Plan
from pagewire.shared.process.peers import Peers
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio


class Scene:
    """Executors without an owner until they are claimed."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.peers = Peers(self.bus)
        self.owners: dict[str, str] = {}
        self.claimed_instances: list[str] = []
        self.mute: set[str] = set()
        """Executors whose answers are lost."""
        self.unanswered: dict[str, set[str]] = defaultdict(set)
        """By scheduler: executors that have not answered it."""

    async def add(self, instance: str, *, owner: str = "", ready: bool = True) -> None:
        def on_claim(message: Message) -> None:
            claim = Decoder(Claim).decode(message.data)
            self.claimed_instances.append(instance)
            accepted = self.owners[instance] in {"", claim.scheduler}
            if accepted:
                self.owners[instance] = claim.scheduler
            if instance not in self.mute:
                self.bus.publish(message.reply, encode(Claimed(instance, accepted, 64, 4, 8, 200)))

        self.owners[instance] = owner
        await self.bus.subscribe(f"{subjects.CLAIM}.{instance}", on_claim)
        await self.beat(instance, free=not owner, ready=ready)

    async def beat(self, instance: str, *, free: bool, ready: bool = True) -> None:
        beat = Heartbeat("executor", instance, ready, 0, 0, 0, {"free": float(free)})
        self.bus.publish(f"{subjects.HEARTBEAT}.executor.{instance}", encode(beat))
        await self.bus.flush()

    async def claim(self, scheduler: str, last: str = "") -> str:
        unanswered = self.unanswered[scheduler]
        result = await claim_executor(self.bus, self.peers, scheduler, "m", last, unanswered)
        return result[1].executor if result is not None else ""


@pytest.fixture
async def scene() -> Scene:
    executors = Scene()
    await executors.peers.listen("executor")
    return executors


async def test_as_many_schedulers_as_executors_get_one_each(scene: Scene) -> None:
    for i in range(8):
        await scene.add(f"e{i}")
    claimed = await asyncio.gather(*(scene.claim(f"s{i}") for i in range(8)))
    assert sorted(claimed) == sorted(scene.owners)
    assert await scene.claim("late") == ""


async def test_an_executor_of_another_scheduler_gets_no_claim(scene: Scene) -> None:
    await scene.add("owned", owner="other")
    assert await scene.claim("s") == ""
    await scene.add("free")
    assert await scene.claim("s") == "free"
    assert scene.claimed_instances == ["free"]


async def test_a_scheduler_may_claim_its_last_executor_again_before_that_is_free(scene: Scene) -> None:
    await scene.add("mine", owner="s")
    assert await scene.claim("s") == ""
    assert await scene.claim("s", last="mine") == "mine"


async def test_an_executor_whose_answer_is_late_is_claimed_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_client, "CLAIM_TIMEOUT", 0.05)
    await scene.add("e")
    scene.mute.add("e")
    assert await scene.claim("s") == ""
    await scene.beat("e", free=False)
    assert await scene.claim("s") == ""
    scene.mute.clear()
    assert await scene.claim("other") == ""
    assert await scene.claim("s") == "e"
    assert not scene.unanswered["s"]


async def test_an_executor_is_claimed_again_when_the_connection_breaks(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def request(subject: str, data: bytes, *, timeout: float) -> Message:
        scene.bus.publish(subject, data, reply=scene.bus.new_inbox())
        await scene.bus.flush()
        raise ConnectionLost("closed by the broker")

    await scene.add("e")
    monkeypatch.setattr(scene.bus, "request", request)
    with pytest.raises(BusError):
        await scene.claim("s")
    monkeypatch.undo()
    await scene.beat("e", free=False)
    assert await scene.claim("s") == "e"


async def test_an_executor_that_declines_after_a_lost_answer_is_asked_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "CLAIM_TIMEOUT", 0.05)
    await scene.add("e")
    scene.mute.add("e")
    assert await scene.claim("s") == ""
    scene.mute.clear()
    scene.owners["e"] = "other"
    await scene.beat("e", free=False)
    for _ in range(2):
        assert await scene.claim("s") == ""
    assert scene.claimed_instances == ["e", "e"]


async def test_an_executor_that_waits_for_a_higher_term_is_free_though_not_ready(scene: Scene) -> None:
    await scene.add("refused", ready=False)
    assert await scene.claim("s") == "refused"


async def test_an_executor_that_has_just_gone_is_passed_over(scene: Scene) -> None:
    await scene.add("there")
    for i in range(5):
        await scene.beat(f"gone{i}", free=True)
    assert await scene.claim("s") == "there"


async def test_without_a_term_nothing_is_claimed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def next_term() -> int:
        raise StorageRefused(subjects.TERM, "no leader")

    await scene.add("e")
    monkeypatch.setattr(scene.bus.store, "next_term", next_term)
    assert await scene.claim("s") == ""
    monkeypatch.undo()
    assert await scene.claim("s") == "e"


PLAN = Plan(1, 1, b"", (), b"", b"", b"", 64, 8)


async def test_an_executor_that_moves_to_another_server_gets_its_plan() -> None:
    bus, elsewhere = (MemoryBus(broker) for broker in [MemoryBroker()] * 2)
    client = ExecutorClient(bus, Peers(bus), "e", 1, lambda step: None)
    reading = asyncio.create_task(client.run())
    await client.subscribed.wait()
    client.send(PLAN)
    await bus.flush()
    plans: list[Message] = []
    await elsewhere.subscribe(f"{subjects.PLAN}.e", plans.append)
    beat = encode(Heartbeat("executor", "e", True, term=1, plan=0, step=0, load={}))

    def come_back() -> bool:
        elsewhere.publish(f"{subjects.HEARTBEAT}.executor.e", beat)
        return bool(plans)

    await until(come_back)
    assert not client.lost.is_set()
    client.end_term()
    await reading


async def test_an_executor_that_does_not_come_back_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_client, "ABSENCE", 0.05)
    monkeypatch.setattr(executor_client, "SILENCE", 1e6)
    bus = MemoryBus(MemoryBroker())
    client = ExecutorClient(bus, Peers(bus), "e", 1, lambda step: None)
    reading = asyncio.create_task(client.run())
    await client.subscribed.wait()
    client.send(PLAN)
    async with asyncio.timeout(PATIENCE):
        await client.lost.wait()
    assert client.failed
    await reading


async def test_a_scheduler_reads_late_heartbeats_before_it_judges_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Timers come before messages on the event loop: after a pause, the heartbeats of that time are still unread."""
    monkeypatch.setattr(executor_client, "SILENCE", 0.02)
    bus = MemoryBus(MemoryBroker())
    client = ExecutorClient(bus, Peers(bus), "e", 1, lambda step: None)
    beat = encode(Heartbeat("executor", "e", True, term=1, plan=0, step=0, load={}))
    flushes = 0

    async def flush(*, timeout: float) -> None:
        nonlocal flushes
        flushes += 1
        if flushes <= 3:
            bus.publish(f"{subjects.HEARTBEAT}.executor.e", beat)
        await asyncio.sleep(0)

    monkeypatch.setattr(bus, "flush", flush)
    await client.run()
    assert flushes == 4, "it is lost when nothing was left to read"


async def test_silence_of_the_broker_says_nothing_about_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_client, "SILENCE", 0.02)
    bus = MemoryBus(MemoryBroker())
    client = ExecutorClient(bus, Peers(bus), "e", 1, lambda step: None)
    flushes = 0

    async def flush(*, timeout: float) -> None:
        nonlocal flushes
        flushes += 1
        if flushes <= 3:
            raise RequestTimeout("the broker is frozen")

    monkeypatch.setattr(bus, "flush", flush)
    await client.run()
    assert flushes == 4


async def test_a_repeated_heartbeat_keeps_a_starved_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_client, "SILENCE", 0.2)
    bus = MemoryBus(MemoryBroker())
    client = ExecutorClient(bus, Peers(bus), "e", 1, lambda step: None)
    reading = asyncio.create_task(client.run())
    await client.subscribed.wait()
    beat = Heartbeat("executor", "e", True, term=1, plan=0, step=0, load={})
    bus.publish(f"{subjects.HEARTBEAT}.executor.e", encode(beat))
    began = time.monotonic()
    while time.monotonic() - began < 0.6:
        bus.publish(f"{subjects.HEARTBEAT}.executor.e", encode(msgspec.structs.replace(beat, repeated=True)))
        await asyncio.sleep(0.01)
    assert not client.lost.is_set()
    client.end_term()
    await reading
