"""The executor on a bus, with a device that has no model."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewire.services.executor import service
from pagewire.services.executor.devices import capacity
from pagewire.services.executor.sequence_key import sequence_key
from pagewire.services.executor.service import Executor
from pagewire.services.executor.steps import step_thread
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import NoResponders
from pagewire.shared.messages import Decoder, encode, unpack
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Claim, Claimed, Plan, Replay
from pagewire.shared.messages.recent_steps import RecentSteps
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.settings.config import Settings
from tests.services.executor.fakes import CAPACITY, PATIENCE, FakeDevice, add, plan, sampling, token_at
from tests.support.waiting import until

INSTANCE = "executor0"
MODEL = "tiny"


class Bench:
    """An executor, the bus, and a test in the place of scheduler and readers."""

    def __init__(self, device: FakeDevice, broker: MemoryBroker) -> None:
        self.device = device
        self.broker = broker
        self.bus = MemoryBus(broker)
        self.steps: asyncio.Queue[Message] = asyncio.Queue()
        self.beats: asyncio.Queue[Heartbeat] = asyncio.Queue()
        settings = Settings(served_model_name=MODEL, device="cpu")
        self.follows = Drain.ALONE
        self.executor = Executor(Context(settings, MemoryBus(broker), INSTANCE, self.beat, lambda: self.follows))

    def beat(self) -> None:
        self.beats.put_nowait(self.executor.heartbeat())

    async def claim(self, term: int, scheduler: str = "a", model: str = MODEL) -> Claimed:
        request = encode(Claim(scheduler, term, model))
        answer = await self.bus.request(f"{subjects.CLAIM}.{INSTANCE}", request, timeout=PATIENCE)
        return Decoder(Claimed).decode(answer.data)

    def send(self, message: Plan) -> None:
        self.bus.publish(f"{subjects.PLAN}.{INSTANCE}", encode(message), reply="_SVC.scheduler")

    async def step(self) -> StepOutput:
        return Decoder(StepOutput).decode((await self.steps.get()).data)

    async def replay(self, term: int, first: int, last: int) -> list[StepOutput]:
        request = encode(Replay(term, first, last))
        answers = self.bus.request_many(f"{subjects.REPLAY}.{INSTANCE}", request, stall=PATIENCE)
        return [Decoder(StepOutput).decode(answer.data) async for answer in answers]


Serve = Callable[[FakeDevice], AbstractAsyncContextManager[Bench]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    @asynccontextmanager
    async def serve(device: FakeDevice) -> AsyncIterator[Bench]:
        monkeypatch.setattr(step_thread, "open_device", lambda settings, folder: device)
        bench = Bench(device, MemoryBroker())
        await bench.bus.subscribe(f"{subjects.STEPS}.{INSTANCE}", bench.steps.put_nowait)
        running = asyncio.create_task(bench.executor.run())
        try:
            async with asyncio.timeout(PATIENCE):
                assert (await bench.beats.get()).ready
                yield bench
        finally:
            running.cancel()
            await asyncio.wait({running})
        assert device.closed
        with pytest.raises(NoResponders):
            await bench.claim(99)

    return serve


@pytest.mark.anyio
async def test_the_answer_to_a_claim_has_the_capacity(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        assert await bench.claim(4) == Claimed(
            executor=INSTANCE,
            accepted=True,
            num_blocks=CAPACITY.num_blocks,
            block_size=CAPACITY.block_size,
            max_num_seqs=CAPACITY.max_num_seqs,
            max_model_len=CAPACITY.max_model_len,
        )
        beat = await bench.beats.get()
        assert (beat.ready, beat.term, beat.plan, beat.step) == (True, 4, 0, -1)


@pytest.mark.anyio
async def test_a_claim_learns_whose_blocks_the_executor_keeps(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        assert (await bench.claim(1)).kept_term == 0
        bench.send(plan(1, add(0, 7, [1, 2, 3], [0, 1], picks=sampling(7, max_tokens=1))))
        await bench.step()
        assert (await bench.claim(2)).kept_term == 1
        assert (await bench.claim(3)).kept_term == 1, "no plan of term 2 has come"
        bench.send(plan(1, term=3, removed=[5]))  # nothing is in that slot
        await until(lambda: not bench.executor.heartbeat().ready)
        assert (await bench.claim(4)).kept_term == 0


@pytest.mark.anyio
async def test_the_heartbeat_says_whether_the_executor_is_free(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        assert bench.executor.heartbeat().load["free"] == 1
        assert (await bench.claim(5, "a")).accepted
        assert bench.executor.heartbeat().load["free"] == 0


@pytest.mark.anyio
async def test_claims_are_declined_for_another_model_and_while_the_owner_lives(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        assert not (await bench.claim(4, model="huge")).accepted
        assert (await bench.claim(5, "a")).accepted
        assert not (await bench.claim(6, "b")).accepted
        assert (await bench.claim(7, "a")).accepted


@pytest.mark.anyio
async def test_plans_become_steps_on_the_bus(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        await bench.claim(1)
        bench.send(plan(1, add(0, 7, [1, 2, 3], [0, 1], picks=sampling(7, max_tokens=3))))
        outputs = [await bench.step() for _ in range(3)]
        assert [(output.term, output.step, output.plan) for output in outputs] == [(1, 0, 1), (1, 1, 1), (1, 2, 1)]
        key = sequence_key(7, 0, 0)
        assert [unpack(output.tokens)[0] for output in outputs] == [token_at(key, at) for at in (3, 4, 5)]
        bench.send(plan(2, removed=[0]))
        assert (await bench.step()).plan == 2
        beat = bench.executor.heartbeat()
        assert (beat.ready, beat.plan, beat.step) == (True, 2, 3)
        assert beat.load["steps"] == 3
        assert beat.load["tokens"] == 5
        assert beat.load["num_slots"] == 0


@pytest.mark.anyio
async def test_the_figures_of_the_latest_steps_go_to_the_gateway_alone(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        await bench.claim(1)
        bench.send(plan(1, add(0, 7, [1, 2, 3], range(4), picks=sampling(7, max_tokens=2))))
        for _ in range(2):
            await bench.step()
        gateway = MemoryBus(bench.broker, inbox_prefix=subjects.gateway_inbox(""))
        answer = await gateway.request(subjects.RECENT_STEPS, b"", timeout=PATIENCE)
        recent = Decoder(RecentSteps).decode(answer.data)
        assert [(step.number, step.prompt_tokens, step.decode_tokens) for step in recent.steps] == [
            (1, 3, 0),
            (2, 0, 1),
        ]
        refused: list[Message] = []
        await gateway.subscribe("elsewhere", refused.append)
        gateway.publish(subjects.RECENT_STEPS, b"", reply="elsewhere")
        await gateway.request(subjects.RECENT_STEPS, b"", timeout=PATIENCE)
        assert not refused


@pytest.mark.anyio
async def test_steps_are_repeated_to_the_asker_alone(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        await bench.claim(1)
        bench.send(plan(1, add(0, 7, [1, 2, 3], range(4), picks=sampling(7, max_tokens=6))))
        outputs = [await bench.step() for _ in range(6)]
        assert await bench.replay(1, 2, 4) == outputs[2:5]
        assert await bench.replay(1, 4, 100) == outputs[4:]
        assert await bench.replay(2, 0, 100) == []
        assert bench.steps.empty()


@pytest.mark.anyio
async def test_a_plan_of_an_old_term_is_ignored(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        await bench.claim(1)
        await bench.claim(2)
        bench.send(plan(1, add(0, 7, [1], [0]), term=1))
        bench.send(plan(1, add(0, 8, [1], [0]), term=2, lease_until=1))
        output = await bench.step()
        assert (output.term, unpack(output.sequences)) == (2, [8])


@pytest.mark.anyio
async def test_a_step_of_an_old_term_is_not_sent(serve: Serve) -> None:
    device = FakeDevice(gated=True)

    async with serve(device) as bench:
        await bench.claim(1)
        bench.send(plan(1, add(0, 7, [1], range(4))))
        assert await asyncio.to_thread(device.entered.acquire, timeout=PATIENCE)
        await bench.claim(2)
        bench.send(plan(1, term=2))
        device.allow()
        output = await bench.step()
        assert (output.term, output.step, output.sequences) == (2, 0, b"")
        assert await bench.replay(1, 0, 9) == []


@pytest.mark.anyio
async def test_a_contradictory_plan_leaves_the_executor_unready_until_a_new_term(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        await bench.claim(1)
        assert (await bench.beats.get()).ready
        bench.send(plan(1, removed=[2]))
        beat = await bench.beats.get()
        assert (beat.ready, beat.term) == (False, 1)
        assert not (await bench.claim(1)).accepted
        assert (await bench.claim(2, "b")).accepted
        assert (await bench.beats.get()).ready
        bench.send(plan(1, term=2))
        assert (await bench.step()).term == 2


@pytest.mark.anyio
async def test_unreadable_messages_are_passed_over(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        await bench.claim(1)
        for data in (b"", b"\x63rest", b"\x01nonsense", encode(Claim("a", 1, MODEL))):
            bench.bus.publish(f"{subjects.PLAN}.{INSTANCE}", data)
        bench.send(plan(1))
        assert (await bench.step()).plan == 1


@pytest.mark.anyio
async def test_the_loop_goes_on_while_a_step_runs(serve: Serve) -> None:
    device = FakeDevice(gated=True)

    async with serve(device) as bench:
        await bench.claim(1)
        bench.send(plan(1, add(0, 7, [1], range(4), picks=sampling(7, max_tokens=1))))
        assert await asyncio.to_thread(device.entered.acquire, timeout=PATIENCE)
        bench.send(plan(2))
        assert not (await bench.claim(2, "b")).accepted
        assert bench.executor.heartbeat().plan == 2
        device.allow()
        assert [(await bench.step()).plan for _ in range(2)] == [1, 2]


@pytest.mark.anyio
async def test_a_lost_device_ends_the_service_with_a_report_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice()
    device.failing = True
    monkeypatch.setattr(step_thread, "open_device", lambda settings, folder: device)

    bench = Bench(device, MemoryBroker())
    await bench.bus.subscribe(f"{subjects.STEPS}.{INSTANCE}", bench.steps.put_nowait)
    running = asyncio.create_task(bench.executor.run())
    async with asyncio.timeout(PATIENCE):
        await bench.beats.get()
        await bench.claim(1)
        bench.send(plan(1, add(0, 7, [1], [0])))
        assert unpack((await bench.step()).failed) == [7]
        with pytest.raises(ExceptionGroup) as failure:
            await running
    assert failure.group_contains(RuntimeError, match="on fire")
    assert not bench.executor.heartbeat().ready
    assert device.closed


@pytest.mark.anyio
async def test_a_claim_is_not_answered_while_the_device_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    device = FakeDevice(replace(CAPACITY, num_blocks=7))

    def open_slowly(settings: Settings, folder: Path) -> FakeDevice:
        assert opened.wait(PATIENCE)
        return device

    monkeypatch.setattr(step_thread, "open_device", open_slowly)

    bench = Bench(device, MemoryBroker())
    running = asyncio.create_task(bench.executor.run())
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(NoResponders):
            await bench.claim(1)
        assert not bench.executor.heartbeat().ready
        opened.set()
        assert (await bench.beats.get()).ready
        assert (await bench.claim(1)).num_blocks == 7
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.anyio
async def test_an_executor_is_free_when_the_process_of_its_scheduler_has_ended(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        await bench.claim(1)
        assert (await bench.beats.get()).load["free"] == 0
        bench.bus.publish(f"{subjects.HEARTBEAT}.scheduler.b", b"")
        bench.bus.publish(f"{subjects.HEARTBEAT}.scheduler.a", b"")
        assert (await bench.beats.get()).load["free"] == 1
        assert (await bench.claim(2, "b")).accepted


async def announce(bench: Bench, service: str, instance: str, **values: Any) -> None:
    """Sends a heartbeat of another service."""
    known = {"ready": True, "term": 0, "plan": 0, "step": 0, "load": {}}
    beat = Heartbeat(service, instance, **{**known, **values})
    bench.bus.publish(f"{subjects.HEARTBEAT}.{service}.{instance}", encode(beat))
    await bench.bus.flush()


@pytest.mark.anyio
async def test_a_free_executor_that_drains_ends_at_once_and_is_claimed_no_more(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        await asyncio.wait_for(bench.executor.drain(), PATIENCE)
        assert bench.executor.heartbeat().load["free"] == 0
        assert not (await bench.claim(5)).accepted


@pytest.mark.anyio
@pytest.mark.parametrize("term", [0, 6])
async def test_an_executor_that_drains_waits_until_its_scheduler_has_left(serve: Serve, term: int) -> None:
    async with serve(FakeDevice()) as bench:
        await announce(bench, "scheduler", "a", term=0)
        await bench.claim(5, "a")
        await announce(bench, "scheduler", "a", term=0)
        draining = asyncio.create_task(bench.executor.drain())
        await until(lambda: bench.executor.heartbeat().load["leaving"])
        await asyncio.sleep(0.05)
        assert not draining.done(), "the scheduler has not begun its term yet"
        await announce(bench, "scheduler", "a", term=5)
        await asyncio.sleep(0.05)
        assert not draining.done()
        await announce(bench, "scheduler", "a", term=term)
        await asyncio.wait_for(draining, PATIENCE)


@pytest.mark.anyio
@pytest.mark.parametrize("load", ["waiting", "free"])
async def test_an_executor_that_drains_serves_until_its_successor_has_started(serve: Serve, load: str) -> None:
    async with serve(FakeDevice()) as bench:
        bench.follows = Drain.SUCCESSOR
        draining = asyncio.create_task(bench.executor.drain())
        await announce(bench, "executor", "other", load={"waiting": 0.0, "free": 0.0})
        await asyncio.sleep(0.05)
        assert not draining.done()
        assert bench.executor.heartbeat().load["leaving"] == 0
        await announce(bench, "executor", "other", load={load: 1.0})
        await asyncio.wait_for(draining, PATIENCE)


@pytest.mark.anyio
async def test_an_executor_is_free_at_once_when_a_scheduler_that_drains_gives_it_up(serve: Serve) -> None:
    async with serve(FakeDevice()) as bench:
        await bench.claim(5, "a")
        for term, draining, free in ((5, False, 0), (0, False, 0), (5, True, 0), (0, True, 1)):
            await announce(bench, "scheduler", "a", term=term, draining=draining, ready=not draining)
            assert bench.executor.heartbeat().load["free"] == free
        assert (await bench.claim(6, "b")).accepted


@pytest.mark.anyio
@pytest.mark.parametrize("room", [True, False])
async def test_the_device_is_opened_beside_a_predecessor_if_memory_has_room(
    room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, resident = FakeDevice(), 1 << 20
    monkeypatch.setattr(step_thread, "open_device", lambda settings, folder: device)
    monkeypatch.setattr(service, "family_bytes", lambda pid: resident)
    monkeypatch.setattr(capacity, "free_memory", lambda: 2 * resident - (not room))
    predecessor = await asyncio.create_subprocess_exec("sleep", "60")
    monkeypatch.setenv("PAGEWIRE_PREDECESSORS", str(predecessor.pid))
    bench = Bench(device, MemoryBroker())
    running = asyncio.create_task(bench.executor.run())
    try:
        if not room:
            await until(lambda: bench.executor.heartbeat().load["waiting"])
            predecessor.terminate()
            await predecessor.wait()
        async with asyncio.timeout(PATIENCE):
            assert (await bench.beats.get()).ready
        assert room == (predecessor.returncode is None)
    finally:
        with suppress(ProcessLookupError):
            predecessor.terminate()
        await predecessor.wait()
        running.cancel()
        await asyncio.wait({running})
