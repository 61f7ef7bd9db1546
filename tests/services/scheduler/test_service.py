"""The scheduler between a queue, a detokenizer and an executor that the test plays."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import pytest

from pagewire.services.scheduler import backlog_reporter, executor_client, service, work_consumer
from pagewire.services.scheduler.policy import service_rate
from pagewire.services.scheduler.policy.beam_search.ranking import BeamSearch
from pagewire.services.scheduler.request_manager import LOOKAHEAD
from pagewire.services.scheduler.service import Scheduler
from pagewire.shared import subjects
from pagewire.shared.bus import Item, Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import Internal, InvalidRequest
from pagewire.shared.messages import Decoder, encode, pack, unpack
from pagewire.shared.messages.abort import AbortedSequences, AbortReason, AbortSequences
from pagewire.shared.messages.attach import NEW, Attach, Attached, AttachState
from pagewire.shared.messages.backlog import Backlog
from pagewire.shared.messages.done import Done
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.open import AbortStream
from pagewire.shared.messages.plan import Claim, Claimed, Plan, Replay
from pagewire.shared.messages.prefixes import CachedPrefixes
from pagewire.shared.messages.step import Finish, StepOutput
from pagewire.shared.messages.work import Sampling, WorkItem
from pagewire.shared.prefix_hashes import SPAN, prefix_hashes
from pagewire.shared.process import peers
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.settings.config import STEP_TOKENS, Settings
from tests.support.beam import run_search
from tests.support.executor import ModelExecutor, generate, next_logprobs
from tests.support.waiting import PATIENCE, until

MODEL = "tiny"
SLOTS = 8
QUEUE = subjects.work_queue(MODEL, 0, subjects.ANY)
NEVER = 1e6
"""Seconds that no test lasts."""

pytestmark = pytest.mark.anyio


@dataclass
class Executor:
    """A model executor on the bus. It steps when the test says so, or by itself."""

    bus: MemoryBus
    instance: str = "exec"
    free_running: bool = True
    max_candidates: int = 32
    slots: int = SLOTS
    num_blocks: int = 64
    max_step_tokens: int = 0
    leaving: bool = False
    """Whether it is about to end."""
    lose_plans: int = 0
    """Plans that do not arrive."""
    lose_steps: int = 0
    """Outputs that are not sent."""
    silent: bool = False
    """Whether it sends no heartbeats."""
    kept_term: int = 0
    """Term of the last plan, whose blocks it keeps."""
    model: ModelExecutor = field(default_factory=lambda: ModelExecutor(64, 4))
    term: int = 0
    sent: list[StepOutput] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    aside: dict[int, Plan] = field(default_factory=dict)

    async def start(self) -> None:
        await self.bus.subscribe(f"{subjects.CLAIM}.{self.instance}", self.on_claim)
        await self.bus.subscribe(f"{subjects.PLAN}.{self.instance}", self.on_plan)
        await self.bus.subscribe(f"{subjects.REPLAY}.{self.instance}", self.on_replay)
        self.beat()

    def beat(self) -> None:
        if self.silent:
            return
        beat = Heartbeat(
            "executor",
            self.instance,
            True,
            self.term,
            self.model.plan,
            self.model.step - 1,
            {"free": float(not self.term), "leaving": float(self.leaving)},
            draining=self.leaving,
        )
        self.bus.publish(f"{subjects.HEARTBEAT}.executor.{self.instance}", encode(beat))

    def on_claim(self, message: Message) -> None:
        claim = Decoder(Claim).decode(message.data)
        assert claim.model == MODEL
        self.term = claim.term
        self.model = ModelExecutor(self.num_blocks, 4, kv=self.model.kv)
        self.sent.clear()
        self.aside.clear()
        room = self.num_blocks, 4, self.slots, 200, self.max_candidates, self.max_step_tokens
        self.bus.publish(message.reply, encode(Claimed(self.instance, True, *room, kept_term=self.kept_term)))

    def on_plan(self, message: Message) -> None:
        assert message.reply
        plan = Decoder(Plan).decode(message.data)
        if plan.term != self.term:
            return
        if self.lose_plans:
            self.lose_plans -= 1
            return
        self.kept_term = plan.term
        self.plans.append(plan)
        self.aside[plan.number] = plan
        expected = self.model.plans[-1].number + 1 if self.model.plans else self.model.plan + 1
        while (following := self.aside.pop(expected, None)) is not None:
            self.model.plans.append(following)
            expected += 1
        if self.free_running:
            self.run()

    def run(self) -> None:
        while self.model.run():
            while self.model.outputs:
                output = replace_term(self.model.outputs.popleft(), self.term)
                self.sent.append(output)
                if self.lose_steps:
                    self.lose_steps -= 1
                else:
                    self.bus.publish(f"{subjects.STEPS}.{self.instance}", encode(output))

    def on_replay(self, message: Message) -> None:
        request = Decoder(Replay).decode(message.data)
        for output in self.sent:
            if request.first <= output.step <= request.last:
                self.bus.publish(message.reply, encode(output))
        self.bus.publish(message.reply, b"")


def replace_term(output: StepOutput, term: int) -> StepOutput:
    return StepOutput(term, *[getattr(output, name) for name in output.__struct_fields__[1:]])


@dataclass
class Detokenizer:
    """Attaches requests and collects the tokens of their sequences."""

    bus: MemoryBus
    instance: str = "detok"
    state: AttachState = AttachState.OPEN
    lose_tokens: int = 0
    """Attachments of running sequences behind whose answers it misses tokens."""
    known: dict[str, list[list[int]]] = field(default_factory=dict)
    attached: list[Attach] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        await self.bus.subscribe(f"{subjects.DETOKENIZER}.{self.instance}.attach", self.on_attach)
        await self.bus.subscribe(f"{subjects.STEPS}.*", self.on_step)

    def on_attach(self, message: Message) -> None:
        attach = Decoder(Attach).decode(message.data)
        self.attached.append(attach)
        known = self.known.get(attach.request_id, [[] for _ in attach.tokens])
        for i, (ours, theirs) in enumerate(zip(known, attach.tokens, strict=True)):
            self.tokens[attach.first_sequence + i] = max(list(ours), unpack(theirs), key=len)
        self.bus.publish(message.reply, encode(Attached(self.state, tuple(map(pack, known)), b"")))
        if self.lose_tokens and attach.step != NEW:
            self.lose_tokens -= 1
            lost = AbortSequences(attach.term, pack([attach.first_sequence]), AbortReason.LOST_TOKENS)
            self.bus.publish(f"{subjects.ABORT}.{attach.scheduler}.abort", encode(lost))
        self.changed.set()

    def on_step(self, message: Message) -> None:
        output = Decoder(StepOutput).decode(message.data)
        for sequence, token in zip(unpack(output.sequences), unpack(output.tokens), strict=True):
            if token != 0xFFFFFFFF:
                self.tokens.setdefault(sequence, []).append(token)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Scene:
    broker: MemoryBroker
    bus: MemoryBus
    scheduler: Scheduler
    executor: Executor
    detokenizer: Detokenizer

    async def work(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 6,
        n: int = 1,
        priority: int = 0,
        target: str = subjects.ANY,
        beams: int = 0,
    ) -> None:
        sampling = Sampling(max_tokens, beam_width=beams, candidates=beams)
        item = WorkItem(name, self.detokenizer.instance, (pack(prompt),), n, sampling, priority, 2e9)
        await self.bus.store.put_work(subjects.work_queue(MODEL, item.priority, target), encode(item))

    async def abort(self, sequences: list[int], term: int) -> int:
        request = encode(AbortSequences(term, pack(sequences), AbortReason.CANCELLED))
        reply = await self.bus.request(f"{subjects.ABORT}.sched.abort", request, timeout=2)
        return Decoder(AbortedSequences).decode(reply.data).known

    def load(self, name: str) -> float:
        return self.scheduler.heartbeat().load.get(name, 0)

    def leaves_executor(self) -> bool:
        term = self.scheduler._manager.term
        return term is not None and term.executor.leaving.is_set()

    def holds(self, sequences: int) -> bool:
        return self.load("running") + self.load("waiting") >= sequences

    async def until_idle(self) -> None:
        names = ("requests", "running", "waiting", "blocks_held")
        await self.detokenizer.until(lambda: not any(self.load(name) for name in names))


@asynccontextmanager
async def scene(
    *,
    follows: Drain = Drain.ALONE,
    ack_wait: float = 30.0,
    budget: int | None = 16,
    executor: Mapping[str, int] = MappingProxyType({}),
    **changes: object,
) -> AsyncIterator[Scene]:
    broker = MemoryBroker(ack_wait=ack_wait)
    bus = MemoryBus(broker)
    settings = Settings(served_model_name=MODEL, max_num_batched_tokens=budget, lease_window=2, **changes)  # type: ignore[arg-type]
    device = Executor(MemoryBus(broker), **executor)  # type: ignore[arg-type]
    detokenizer = Detokenizer(MemoryBus(broker))
    await detokenizer.start()
    scheduler = Scheduler(Context(settings, MemoryBus(broker), "sched", lambda: None, lambda: follows))
    running = asyncio.create_task(scheduler.run())
    await asyncio.wait({asyncio.create_task(device.start()), running}, return_when=asyncio.FIRST_COMPLETED)
    beating = asyncio.create_task(beat(device, detokenizer))
    try:
        yield Scene(broker, bus, scheduler, device, detokenizer)
    finally:
        beating.cancel()
        running.cancel()
        await asyncio.gather(beating, running, return_exceptions=True)


async def beat(executor: Executor, detokenizer: Detokenizer) -> None:
    while True:
        executor.beat()
        detokenizer.changed.set()
        await asyncio.sleep(0.05)


async def test_requests_run_to_their_end_and_leave_nothing_behind() -> None:
    async with scene() as s:
        for i in range(20):
            await s.work(f"r{i}", [i] * (i + 1), n=1 + i % 3)
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 20)
        await s.until_idle()
        for attach in s.detokenizer.attached:
            i = int(attach.request_id[1:])
            assert len(attach.tokens) == 1 + i % 3
            for choice in range(len(attach.tokens)):
                assert s.detokenizer.tokens[attach.first_sequence + choice] == generate([i] * (i + 1), 6, [])


async def test_tokens_that_the_detokenizer_knows_are_not_generated_again() -> None:
    async with scene() as s:
        expected = generate([5, 6], 9, [])
        s.detokenizer.known["r"] = [expected[:4]]
        await s.work("r", [5, 6], max_tokens=9)
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 1)
        await s.until_idle()
        assert s.detokenizer.tokens[s.detokenizer.attached[0].first_sequence] == expected
        assert unpack(s.executor.plans[0].added[0].tokens) == [5, 6, *expected[:4]]
        assert s.executor.plans[0].added[0].prompt_tokens == 2


async def test_a_request_that_ended_at_the_detokenizer_is_not_run() -> None:
    """It was cancelled while it waited in the queue."""
    async with scene() as s:
        s.detokenizer.state = AttachState.ENDED
        await s.work("r", [5, 6])
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 1)
        await s.until_idle()
        assert not s.executor.plans


async def test_aborting_a_sequence_frees_it_and_doing_so_again_is_harmless() -> None:
    async with scene() as s:
        s.executor.free_running = False
        await s.work("r", [5, 6], max_tokens=100)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        attach = s.detokenizer.attached[0]
        assert await s.abort([attach.first_sequence], attach.term + 1) == 0
        assert await s.abort([attach.first_sequence], attach.term) == 1
        assert await s.abort([attach.first_sequence], attach.term) == 0
        s.executor.run()
        s.executor.free_running = True
        await s.until_idle()


async def test_lost_plans_and_lost_steps_are_repaired() -> None:
    """No later message shows the gap, only heartbeats do."""
    async with scene() as s:
        await s.work("warm", [1], max_tokens=2)
        await s.until_idle()
        s.executor.lose_plans = 2
        await s.work("a", [5, 6], max_tokens=12)
        await s.detokenizer.until(lambda: s.executor.lose_plans == 0)
        s.executor.lose_steps = 3
        await s.work("b", [7, 8], max_tokens=12)
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 3)
        await s.until_idle()
        await s.detokenizer.until(lambda: not s.executor.model.slots)


async def test_a_lost_executor_is_replaced_under_a_higher_term_and_no_token_is_lost() -> None:
    async with scene() as s:
        s.executor.free_running = False
        for i in range(3):
            await s.work(f"r{i}", [i, i], max_tokens=20)
        await s.detokenizer.until(lambda: len(s.executor.plans) >= 1 and s.load("requests") == 3)
        old = s.executor.term
        s.executor.run()
        # Its successor wakes up with the same name and another scheduler's term.
        s.executor.term += 1
        s.executor.beat()
        s.executor.free_running = True
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 6)
        assert s.executor.term > old
        await s.until_idle()
        last = {a.request_id: a for a in s.detokenizer.attached}
        assert all(a.term == s.executor.term for a in last.values())
        for i in range(3):
            tokens = s.detokenizer.tokens[last[f"r{i}"].first_sequence]
            assert tokens == generate([i, i], 20, [])


async def test_the_computed_part_of_a_prompt_survives_a_false_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor_client, "SILENCE", 0.2)
    async with scene(executor={"free_running": False}) as s:
        prompt = list(range(40))
        await s.work("r", prompt, max_tokens=5)
        await until(lambda: s.executor.plans)
        s.executor.run()  # both steps of the lease
        await until(lambda: s.executor.plans[-1].lease_until > 2)
        old = s.executor.term
        s.executor.silent = True
        await until(lambda: s.executor.plans[-1].term > old)
        s.executor.silent, s.executor.free_running = False, True
        added = next(plan.added[0] for plan in s.executor.plans if plan.term > old)
        assert added.computed == 2 * 16
        s.executor.run()
        await until(lambda: not s.load("requests") and not s.load("running"))
        assert s.detokenizer.tokens[s.detokenizer.attached[-1].first_sequence] == generate(prompt, 5, [])


async def test_an_executor_whose_process_has_ended_is_lost_before_it_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor_client, "SILENCE", NEVER)
    async with scene() as s:
        s.executor.free_running = False
        await s.work("r", [5, 6], max_tokens=20)
        await s.detokenizer.until(lambda: len(s.executor.plans) >= 1)
        successor = Executor(MemoryBus(s.broker), instance="successor")
        await successor.start()
        s.bus.publish(f"{subjects.HEARTBEAT}.executor.{s.executor.instance}", b"")
        await until(lambda: successor.plans)


async def test_the_work_of_a_lost_executor_goes_to_a_scheduler_that_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "HAND_BACK_AFTER", NEVER)
    monkeypatch.setattr(peers, "SILENCE", NEVER)
    async with scene(executor={"free_running": False}) as s:
        await s.work("r", [5, 6], max_tokens=20)
        await s.detokenizer.until(lambda: len(s.executor.plans) >= 1)
        other = Heartbeat("scheduler", "other", ready=True, term=0, plan=0, step=0, load={})
        s.bus.publish(f"{subjects.HEARTBEAT}.scheduler.other", encode(other))
        s.bus.publish(f"{subjects.HEARTBEAT}.executor.{s.executor.instance}", b"")
        assert len(await s.bus.store.pull_work(QUEUE, 1, expires=PATIENCE)) == 1


def admitted(executor: Executor) -> set[int]:
    """First token of each prompt that has got a slot in the executor's present term."""
    plans = [plan for plan in executor.plans if plan.term == executor.term]
    return {unpack(added.tokens)[0] for plan in plans for added in plan.added}


async def test_the_request_that_kills_executors_when_it_runs_alone_is_ended() -> None:
    async with scene() as s:
        refused: list[AbortStream] = []

        def on_abandon(message: Message) -> None:
            refused.append(Decoder(AbortStream).decode(message.data))
            s.bus.publish(message.reply, b"")

        async def replace_executor(name: str) -> None:
            old, s.executor.instance, s.executor.term = s.executor.instance, name, 0
            await s.executor.start()
            s.bus.publish(f"{subjects.HEARTBEAT}.executor.{old}", b"")

        await s.bus.subscribe(f"{subjects.DETOKENIZER}.detok.abort", on_abandon)
        s.executor.free_running = False
        await s.work("good", [5, 6], max_tokens=20)
        await s.work("poison", [7, 8], max_tokens=20)
        for name in ("second", "third"):
            await s.detokenizer.until(lambda: admitted(s.executor) == {5, 7})
            await replace_executor(name)
        await s.detokenizer.until(lambda: admitted(s.executor) == {5})
        s.executor.free_running = True
        s.executor.run()
        s.executor.free_running = False
        await s.detokenizer.until(lambda: admitted(s.executor) == {7})
        await replace_executor("fourth")
        await s.detokenizer.until(lambda: bool(refused))
        assert (refused[0].request_id, refused[0].error) == ("poison", Internal.kind)
        await s.work("later", [9], max_tokens=5)
        s.executor.free_running = True
        await s.detokenizer.until(lambda: len(s.executor.plans) > 0 and 9 in admitted(s.executor))
        await s.until_idle()
        last = {a.request_id: a.first_sequence for a in s.detokenizer.attached}
        assert s.detokenizer.tokens[last["good"]] == generate([5, 6], 20, [])
        assert s.detokenizer.tokens[last["later"]] == generate([9], 5, [])


async def test_a_second_delivery_brings_the_newer_ack_and_no_second_admission() -> None:
    async with scene(ack_wait=0.1) as s:  # shorter than the renewal, so that it is delivered again
        s.executor.free_running = False
        await s.work("r", [5, 6], max_tokens=100)
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) >= 2)
        first, second = s.detokenizer.attached[:2]
        assert first.first_sequence == second.first_sequence
        assert second.generation > first.generation
        assert s.load("requests") == 1


async def test_of_two_items_of_a_request_the_later_one_stays() -> None:
    """A tokenizer that the store has not answered in time stores the request again."""
    async with scene() as s:
        s.executor.free_running = False
        await s.work("r", [5, 6], max_tokens=100)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        await s.work("r", [5, 6], max_tokens=100)
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 2)
        first, second = s.detokenizer.attached
        assert second.first_sequence == first.first_sequence
        assert await s.bus.store.missing_work({1, 2}) == {1}
        assert s.load("requests") == 1


async def test_an_earlier_item_of_a_request_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_consumer, "SILENCE", 0.01)
    monkeypatch.setattr(work_consumer, "LOOK_EVERY", 0.01)
    async with scene() as s:
        s.executor.free_running = False
        orphaned = subjects.work_queue(MODEL, 0, "gone")
        await s.work("r", [5, 6], max_tokens=100, target="gone")
        (earlier,) = await s.bus.store.pull_work(orphaned, 1, expires=1)  # both without a turn of the event loop
        await s.work("r", [5, 6], max_tokens=100)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        await s.bus.store.return_work(earlier.ack)
        async with asyncio.timeout(PATIENCE):
            while not await s.bus.store.missing_work({earlier.number}):
                s.scheduler._manager.consumer.notify()
        assert await s.bus.store.missing_work({earlier.number + 1}) == set()
        assert len(s.detokenizer.attached) == 1


async def test_a_repeated_request_goes_on_at_the_successor_of_its_detokenizer() -> None:
    async with scene() as s:
        s.executor.free_running = False
        await s.work("r", [5, 6], max_tokens=20)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        s.executor.run()
        await s.detokenizer.until(lambda: s.scheduler.heartbeat().step > 0)
        successor = Detokenizer(MemoryBus(s.broker), instance="successor")
        await successor.start()
        s.detokenizer.instance = "successor"
        await s.work("r", [5, 6], max_tokens=20)
        await successor.until(lambda: bool(successor.attached))
        s.executor.free_running = True
        s.executor.run()
        await s.until_idle()
        assert successor.attached[0].order > s.detokenizer.attached[0].order
        assert successor.tokens[successor.attached[0].first_sequence] == generate([5, 6], 20, [])
        assert len({added.sequence for plan in s.executor.plans for added in plan.added}) == 1


async def test_an_item_whose_end_is_recorded_is_not_generated_again() -> None:
    async with scene(ack_wait=0.5) as s:
        await s.bus.store.put_done("r", encode(Done("r", b"", (), 0, 0, "", "")))
        s.detokenizer.state = AttachState.UNKNOWN
        await s.work("r", [5, 6])
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 1)
        await s.until_idle()
        assert not await s.bus.store.pull_work(QUEUE, 1, expires=0.7)
        assert len(s.detokenizer.attached) == 1


async def test_unreadable_items_and_requests_are_dropped_and_harm_no_request() -> None:
    async with scene() as s:
        await s.bus.store.put_work(QUEUE, b"\x01nonsense")
        await s.bus.store.put_work(QUEUE, b"\x63")
        s.bus.publish(f"{subjects.ABORT}.sched.abort", b"nonsense")
        s.bus.publish(f"{subjects.STEPS}.exec", b"nonsense")
        await s.work("r", [5, 6])
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 1)
        await s.until_idle()


async def test_items_go_back_to_the_queue_when_the_scheduler_ends() -> None:
    async with scene() as s:
        s.executor.free_running = False
        await s.work("r", [5, 6], max_tokens=100)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        broker = s.broker
    items = await MemoryBus(broker).store.pull_work(QUEUE, 1, expires=2)
    assert [Decoder(WorkItem).decode(item.data).request_id for item in items] == ["r"]
    assert items[0].deliveries == 2


async def test_urgent_work_does_not_wait_behind_a_crowd() -> None:
    async with scene() as s:
        s.executor.free_running = False
        for i in range(40):
            await s.work(f"r{i}", [i, i], max_tokens=30)
        await s.detokenizer.until(lambda: s.load("requests") == SLOTS + LOOKAHEAD)
        await s.work("urgent", [7, 7], priority=-1)
        await s.work("low", [7, 8], priority=1)
        await s.detokenizer.until(lambda: s.load("requests") == SLOTS + LOOKAHEAD + 2)
        s.executor.free_running = True
        s.executor.run()
        await s.detokenizer.until(lambda: len(s.executor.plans) > 4)
        await s.until_idle()
        order = [a.sequence for plan in s.executor.plans for a in plan.added]
        names = {a.first_sequence: a.request_id for a in s.detokenizer.attached}
        first = list(dict.fromkeys(names[sequence] for sequence in order))
        assert len(first) == 42
        assert "urgent" in first[SLOTS : SLOTS + 2], first


async def test_every_slot_is_taken_while_nothing_ends() -> None:
    async with scene(budget=40, executor={"slots": 32, "num_blocks": 2000}) as s:
        s.executor.free_running = False
        for i in range(40):  # all but the first of them wait for prompt tokens of the steps
            await s.work(f"r{i}", [i] * 60, max_tokens=139)
            await s.detokenizer.until(partial(s.holds, min(i + 1, 22)))
        assert s.load("requests") == 22, "more would wait here than LOOKAHEAD beside the slots that are free"
        s.executor.free_running = True
        s.executor.run()
        await s.detokenizer.until(lambda: s.load("running") == 32)
        assert not any(any(output.finishes) for output in s.executor.sent)
        await s.until_idle()


async def test_without_a_budget_of_the_users_steps_grow_as_far_as_the_device_allows() -> None:
    async with scene(budget=None, executor={"num_blocks": 1000, "max_step_tokens": 700}) as s:
        for i in range(60):
            await s.work(f"r{i}", [i] * 190, max_tokens=2)
        await s.until_idle()
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 60)
        await s.until_idle()
        assert s.executor.plans[0].budget == STEP_TOKENS
        assert max(plan.budget for plan in s.executor.plans) == 700


async def test_a_scheduler_takes_its_own_queue_and_advertises_its_prefixes() -> None:
    async with scene() as s:
        advertised: list[CachedPrefixes] = []
        await s.bus.subscribe(
            f"{subjects.PREFIXES}.{MODEL}.sched", lambda m: advertised.append(Decoder(CachedPrefixes).decode(m.data))
        )
        prompt = [i % 100 for i in range(SPAN)]
        await s.work("r", prompt, target="sched")
        await s.detokenizer.until(lambda: bool(s.detokenizer.attached))
        await s.until_idle()
        await s.detokenizer.until(lambda: bool(advertised) and bool(advertised[-1].hashes))
        assert unpack(advertised[-1].hashes) == prefix_hashes(pack(prompt))
        assert advertised[-1].slots == SLOTS


async def test_items_without_an_executor_return_to_their_queue() -> None:
    broker = MemoryBroker(ack_wait=30.0)
    settings = Settings(served_model_name=MODEL)
    scheduler = Scheduler(Context(settings, MemoryBus(broker), "sched", lambda: None))
    item = Item(b"anything", {}, "ack.1.1", 1, 1, 0.0)
    returned: list[str] = []

    async def note(ack: str) -> None:
        returned.append(ack)

    broker.store.return_work = note  # type: ignore[method-assign]
    running = asyncio.create_task(scheduler.run())
    await until(lambda: scheduler._manager._tasks is not None)
    scheduler._manager._on_item(QUEUE, item)
    await until(lambda: returned == [item.ack])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_request_past_its_deadline_gets_no_slot_and_is_forgotten() -> None:
    async with scene() as s:
        sampling = Sampling(6)
        late = WorkItem("late", s.detokenizer.instance, (pack([5, 6]),), 1, sampling, 0, deadline=1.0)
        await s.bus.store.put_work(QUEUE, encode(late))
        await s.work("next", [5, 6])
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 1)
        await s.until_idle()
        assert [attach.request_id for attach in s.detokenizer.attached] == ["next"]
        assert sum(len(plan.added) for plan in s.executor.plans) == 1
        assert list(s.broker.store._entries) == ["2"], "the late item is not delivered again"


@pytest.mark.parametrize("skew", [-600, 600])
async def test_deadlines_survive_a_wrong_clock(monkeypatch: pytest.MonkeyPatch, skew: float) -> None:
    """The tokenizer has written them by the broker's clock; this scheduler's own clock differs."""
    right = time.time
    async with scene() as s:
        monkeypatch.setattr(type(s.bus.store), "now", lambda _: right())
        monkeypatch.setattr(time, "time", lambda: right() + skew)
        for name, deadline in (("late", right() - 1), ("next", right() + 60)):
            item = WorkItem(name, s.detokenizer.instance, (pack([5, 6]),), 1, Sampling(6), 0, deadline=deadline)
            await s.bus.store.put_work(QUEUE, encode(item))
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 1)
        await s.until_idle()
        assert [attach.request_id for attach in s.detokenizer.attached] == ["next"]
        assert sum(len(plan.added) for plan in s.executor.plans) == 1


async def listen_for_backlog(bus: MemoryBus) -> list[Backlog]:
    reports: list[Backlog] = []
    subject = f"{subjects.BACKLOG}.{MODEL}.sched"
    await bus.subscribe(subject, lambda message: reports.append(Decoder(Backlog).decode(message.data)))
    return reports


async def test_waiting_and_started_requests_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_reporter, "REPORT_EVERY", 0.05)
    async with scene() as s:
        s.executor.free_running = False
        reports = await listen_for_backlog(s.bus)
        await until(lambda: reports and reports[-1].free == SLOTS)
        assert (reports[-1].stored, reports[-1].started, reports[-1].rate) == ((0, 0, 0), (0, 0, 0), 0)
        for i in range(SLOTS + LOOKAHEAD + 5):
            await s.work(f"r{i}", [5, i], max_tokens=50)
        await s.work("later", [5, 6], priority=3)
        await until(lambda: sum(reports[-1].started) == SLOTS)
        assert reports[-1].stored == (0, SLOTS + LOOKAHEAD + 5, 1)
        assert reports[-1].last == SLOTS + LOOKAHEAD + 6
        assert reports[-1].free == 0
        assert reports[-1].starts[1] > 0


async def test_the_rate_is_known_when_requests_have_run_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_rate, "KNOWN_AFTER", 0.1)
    monkeypatch.setattr(backlog_reporter, "REPORT_EVERY", 0.05)
    async with scene(executor={"num_blocks": 1000}) as s:
        s.executor.free_running = False
        reports = await listen_for_backlog(s.bus)
        for i in range(3 * SLOTS):
            await s.work(f"r{i}", [5, i], max_tokens=20)
        while not (reports and reports[-1].rate):
            s.executor.run()
            await asyncio.sleep(0.02)  # steps take time
        s.executor.free_running = True
        s.executor.run()
        for attach in list(s.detokenizer.attached):
            await s.bus.store.end_work(attach.ack)


async def test_only_the_scheduler_with_the_lowest_id_counts_stored_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_reporter, "REPORT_EVERY", 0.05)
    monkeypatch.setattr(backlog_reporter, "SILENCE", 0.3)
    async with scene() as s:
        reports = await listen_for_backlog(s.bus)
        for scheduler, counts in (("zzz", True), ("aaa", False)):
            other = encode(Backlog(scheduler, (0, 0, 0), (0.0, 0.0, 0.0), 0.0, 0.0))
            s.bus.publish(f"{subjects.BACKLOG}.{MODEL}.{scheduler}", other)
            await s.bus.flush()
            await until(lambda: reports)
            reports.clear()
            await until(lambda: reports)
            assert bool(reports[0].stored) is counts
        await until(lambda: reports[-1].stored)


def searched(prompt: list[int], beams: int, max_tokens: int) -> list[list[int]]:
    """The results of a beam search, best first."""
    hypotheses = run_search(BeamSearch(beams, max_tokens, 1.0, ()), prompt, beams, next_logprobs)
    return [hypothesis.tokens for hypothesis in hypotheses]


async def test_a_beam_search_is_handed_over_whole_and_its_beams_are_never_bound() -> None:
    async with scene() as s:
        await s.work("r", [5, 6], max_tokens=7, n=2, beams=3)
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 2)
        first, last = s.detokenizer.attached
        assert first.tokens == (b"", b"")
        assert first.first_sequence == last.first_sequence
        assert [unpack(tokens) for tokens in last.tokens] == searched([5, 6], 3, 7)[:2]
        assert list(last.finishes) == [Finish.LENGTH] * 2
        await s.until_idle()
        bound = range(last.first_sequence, last.first_sequence + 2)
        ran = {sequence for output in s.executor.sent for sequence in unpack(output.sequences)}
        assert ran
        assert not ran & set(bound)
        assert any(plan.forks for plan in s.executor.plans)
        assert any(plan.copies for plan in s.executor.plans)


async def test_an_aborted_beam_search_is_freed() -> None:
    async with scene() as s:
        await s.work("r", [5, 6], max_tokens=80, n=2, beams=2)
        await s.detokenizer.until(lambda: any(plan.forks for plan in s.executor.plans))
        attach = s.detokenizer.attached[0]
        assert await s.abort([attach.first_sequence, attach.first_sequence + 1], attach.term) == 1
        await s.until_idle()
        await s.detokenizer.until(lambda: not s.executor.model.slots)


async def test_a_beam_search_begins_again_with_another_executor() -> None:
    async with scene() as s:
        await s.work("r", [5, 6], max_tokens=30, n=1, beams=4)
        await s.detokenizer.until(lambda: len(s.executor.plans) > 8)
        s.executor.term += 1  # its successor wakes up with another scheduler's term
        s.executor.beat()
        await s.detokenizer.until(lambda: any(any(attach.finishes) for attach in s.detokenizer.attached))
        last = s.detokenizer.attached[-1]
        assert last.term > s.detokenizer.attached[0].term
        assert unpack(last.tokens[0]) == searched([5, 6], 4, 30)[0]
        await s.until_idle()


async def test_a_result_that_no_detokenizer_takes_is_searched_again() -> None:
    async with scene(ack_wait=0.5) as s:
        await s.work("r", [5, 6], max_tokens=5, n=1, beams=2)
        await s.detokenizer.until(lambda: bool(s.detokenizer.attached))
        s.detokenizer.state = AttachState.UNKNOWN
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) > 2)
        s.detokenizer.state = AttachState.OPEN
        num_attached = len(s.detokenizer.attached)
        await s.detokenizer.until(lambda: any(any(a.finishes) for a in s.detokenizer.attached[num_attached:]))
        last = s.detokenizer.attached[-1]
        assert last.generation > 1
        assert unpack(last.tokens[0]) == searched([5, 6], 2, 5)[0]


@pytest.mark.parametrize(
    ("beams", "max_tokens", "candidates", "reason"),
    [
        (2, 5, 0, "is not built for this device"),
        (8, 5, 7, "the device reports 7"),
        (9, 5, 32, "beam_width must be at most 8"),
        (8, 190, 32, "KV blocks"),
    ],
)
async def test_a_beam_search_that_the_device_cannot_run_is_refused(
    beams: int, max_tokens: int, candidates: int, reason: str
) -> None:
    async with scene(executor={"max_candidates": candidates}) as s:
        refused: list[AbortStream] = []

        def on_abandon(message: Message) -> None:
            refused.append(Decoder(AbortStream).decode(message.data))
            s.bus.publish(message.reply, b"")
            s.detokenizer.changed.set()

        await s.bus.subscribe(f"{subjects.DETOKENIZER}.detok.abort", on_abandon)
        await s.work("r", [5, 6], max_tokens=max_tokens, beams=beams)
        await s.detokenizer.until(lambda: bool(refused))
        assert (refused[0].request_id, refused[0].error) == ("r", InvalidRequest.kind)
        assert reason in refused[0].message
        await s.until_idle()
        assert not s.detokenizer.attached
        assert not s.executor.plans


class TestDrain:
    """A scheduler that is about to end, and one whose executor is."""

    async def other(self, s: Scene, *, ready: bool = False, claiming: bool = False) -> None:
        """Lets another scheduler send a heartbeat."""
        beat = Heartbeat("scheduler", "other", ready, 0, 0, 0, {"claiming": float(claiming)})
        s.bus.publish(f"{subjects.HEARTBEAT}.scheduler.other", encode(beat))
        await s.bus.flush()

    async def returned(self, s: Scene) -> list[str]:
        """The requests that wait in the queue."""
        items = await s.bus.store.pull_work(QUEUE, 100, expires=0.01)
        return sorted(Decoder(WorkItem).decode(item.data).request_id for item in items)

    @pytest.mark.parametrize("follows", [Drain.ALONE, Drain.SUCCESSOR])
    async def test_a_draining_scheduler_hands_over_work_and_executor(self, follows: Drain) -> None:
        async with scene(follows=follows, executor={"free_running": False}) as s:
            await s.work("r", [5, 6], max_tokens=9)
            await s.detokenizer.until(lambda: s.load("running") == 1)
            assert s.scheduler.heartbeat().term == s.executor.term
            await self.other(s, claiming=True)
            await asyncio.wait_for(s.scheduler.drain(), PATIENCE)
            assert await self.returned(s) == ["r"]
            beat = s.scheduler.heartbeat()
            assert (beat.ready, beat.term, beat.load["claiming"]) == (False, 0, 0)

    async def test_a_draining_scheduler_goes_on_until_its_successor_has_come(self) -> None:
        async with scene(follows=Drain.SUCCESSOR) as s:
            draining = asyncio.create_task(s.scheduler.drain())
            await self.other(s, ready=True)
            await s.work("r", [5, 6])
            await s.detokenizer.until(lambda: bool(s.detokenizer.attached))
            await s.until_idle()
            assert not draining.done(), "another replica is no successor"
            await self.other(s, claiming=True)
            await asyncio.wait_for(draining, PATIENCE)

    async def test_a_lone_draining_scheduler_ends_running_requests_and_returns_others(self) -> None:
        async with scene(executor={"free_running": False}) as s:
            names = [f"r{i:02}" for i in range(SLOTS + 3)]
            for i, name in enumerate(names):
                await s.work(name, [i, i], max_tokens=4)
            await s.detokenizer.until(lambda: s.load("running") == SLOTS and s.load("waiting") == 3)
            draining = asyncio.create_task(s.scheduler.drain())
            await s.detokenizer.until(lambda: s.load("waiting") == 0)
            await s.work("late", [1], max_tokens=4)
            s.executor.free_running = True
            s.executor.run()
            await asyncio.wait_for(draining, PATIENCE)
            ran = {attach.request_id for attach in s.detokenizer.attached if attach.first_sequence <= SLOTS}
            assert await self.returned(s) == ["late", *sorted(set(names) - ran)]
            assert s.load("requests") == 0

    async def test_a_free_executor_takes_over_at_once_from_a_leaving_one(self) -> None:
        async with scene(executor={"free_running": False}) as s:
            await s.work("r", [5, 6], max_tokens=9)
            await s.detokenizer.until(lambda: s.load("running") == 1)
            second = Executor(MemoryBus(s.broker), "exec2")
            await second.start()
            s.executor.leaving = True
            await s.detokenizer.until(lambda: second.term > s.executor.term)
            await s.until_idle()
            last = s.detokenizer.attached[-1]
            assert (len(s.detokenizer.attached), last.executor) == (2, "exec2")
            assert s.detokenizer.tokens[last.first_sequence] == generate([5, 6], 9, [])

    async def test_a_leaving_executor_finishes_running_requests_and_gets_no_new_ones(self) -> None:
        async with scene(executor={"free_running": False}) as s:
            await s.work("r", [5, 6], max_tokens=9)
            await s.detokenizer.until(lambda: s.load("running") == 1)
            s.executor.leaving = True
            await s.detokenizer.until(s.leaves_executor)
            await s.work("late", [1, 2])
            s.executor.free_running = True
            s.executor.run()
            await s.detokenizer.until(lambda: not s.scheduler.heartbeat().ready)
            assert s.load("running") == 0
            assert [attach.request_id for attach in s.detokenizer.attached] == ["r"]
            assert s.detokenizer.tokens[1] == generate([5, 6], 9, [])
            second = Executor(MemoryBus(s.broker), "exec2")
            await second.start()
            await s.detokenizer.until(lambda: "late" in {attach.request_id for attach in s.detokenizer.attached})
            await s.until_idle()
            assert second.plans
