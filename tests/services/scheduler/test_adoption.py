"""Requests whose detokenizer is gone, drains or has missed tokens, and the scheduler that finds them another one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBus
from pagewire.shared.messages import Decoder, encode, pack, unpack
from pagewire.shared.messages.abort import AbortedSequences, AbortReason, AbortSequences
from pagewire.shared.messages.attach import NEW, Attach, Attached, AttachState
from pagewire.shared.messages.heartbeat import UNSENT, Heartbeat
from pagewire.shared.messages.work import Sampling, WorkItem
from tests.services.scheduler.test_service import QUEUE, Detokenizer, Scene, scene
from tests.support.executor import generate
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

PROMPT = [5, 6]
OPENING = b"opens the stream"


def say(s: Scene, instance: str, *, ready: bool = True, draining: bool = False, step: int = 0, term: int = 1) -> None:
    beat = Heartbeat("detokenizer", instance, ready, term, 0, step, {UNSENT: 0}, {term: step}, draining)
    s.bus.publish(f"{subjects.HEARTBEAT}.detokenizer.{instance}", encode(beat))


def end(s: Scene, instance: str) -> None:
    s.bus.publish(f"{subjects.HEARTBEAT}.detokenizer.{instance}", b"")


async def work(s: Scene, max_tokens: int, detokenizer: str = "detok", logprobs: int = -1) -> None:
    sampling = Sampling(max_tokens, logprobs=logprobs)
    item = WorkItem("r", detokenizer, (pack(PROMPT),), 1, sampling, 0, 2e9, opening=OPENING)
    await s.bus.store.put_work(QUEUE, encode(item))


@asynccontextmanager
async def successor(s: Scene, name: str = "next") -> AsyncIterator[Detokenizer]:
    second = Detokenizer(MemoryBus(s.broker), instance=name)
    await second.start()
    say(s, name)
    yield second


async def run_first_step(s: Scene) -> None:
    """Lets a request of 20 tokens begin, whose executor then waits to be run again."""
    s.executor.free_running = False
    await work(s, 20)
    await s.detokenizer.until(lambda: bool(s.executor.plans))
    s.executor.run()
    await s.detokenizer.until(lambda: s.scheduler.heartbeat().step > 0)


async def test_the_successor_gets_the_tokens_so_far_and_the_opening() -> None:
    async with scene() as s:
        s.executor.free_running = False
        say(s, "detok")
        await work(s, 20)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        assert s.detokenizer.attached[0].step == NEW
        s.executor.run()
        await s.detokenizer.until(lambda: s.scheduler.heartbeat().step > 0)
        async with successor(s) as second:
            end(s, "detok")
            await second.until(lambda: bool(second.attached))
            attach = second.attached[0]
            assert (attach.opening, attach.move) == (OPENING, 1)
            assert attach.first_sequence == s.detokenizer.attached[0].first_sequence
            assert unpack(attach.tokens[0]) == generate(PROMPT, 20, [])[: len(unpack(attach.tokens[0]))]
            assert attach.step == s.scheduler.heartbeat().step
            s.executor.free_running = True
            s.executor.run()
            await second.until(lambda: second.tokens[attach.first_sequence] == generate(PROMPT, 20, []))


async def test_without_a_detokenizer_tokens_are_kept_for_the_next_one() -> None:
    async with scene(ack_wait=1.0) as s:
        s.executor.free_running = False
        say(s, "detok")
        await work(s, 20)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        end(s, "detok")
        await s.bus.flush()
        s.executor.free_running = True
        s.executor.run()
        await s.detokenizer.until(lambda: not s.load("running"))
        assert s.load("requests") == 1
        async with successor(s) as second:
            await second.until(lambda: bool(second.attached))
            attach = second.attached[0]
            assert unpack(attach.tokens[0]) == generate(PROMPT, 20, [])
            assert any(attach.finishes)


async def test_an_ended_request_is_kept_until_its_detokenizer_has_read_the_end() -> None:
    async with scene() as s:
        say(s, "detok", step=0)
        await work(s, 6)
        await s.detokenizer.until(lambda: bool(s.detokenizer.attached) and not s.load("running"))
        assert s.load("requests") == 1
        say(s, "detok", step=100)
        await s.until_idle()


async def test_an_item_that_names_a_dead_detokenizer_goes_to_the_first_in_rank() -> None:
    async with scene() as s:
        say(s, "dead")
        end(s, "dead")
        async with successor(s) as second:
            await work(s, 6, "dead")
            await second.until(lambda: bool(second.attached))
            assert second.attached[0].opening == OPENING
            await second.until(lambda: second.tokens[second.attached[0].first_sequence] == generate(PROMPT, 6, []))


async def test_an_item_that_names_an_unknown_detokenizer_goes_to_the_first_in_rank() -> None:
    async with scene() as s, successor(s) as second:
        await work(s, 6, "unknown")
        await second.until(lambda: bool(second.attached))


async def test_a_draining_detokenizer_keeps_its_requests_until_another_one_is_ready() -> None:
    async with scene() as s:
        s.executor.free_running = False
        say(s, "detok", ready=False, draining=True)
        await work(s, 20)
        await s.detokenizer.until(lambda: bool(s.detokenizer.attached))
        assert not s.detokenizer.attached[0].opening
        async with successor(s) as second:
            await second.until(lambda: bool(second.attached))
            assert second.attached[0].opening == OPENING


async def test_a_detokenizer_without_the_stream_gets_the_opening() -> None:
    async with scene() as s:
        s.detokenizer.state = AttachState.UNKNOWN
        await work(s, 6)
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 2)
        assert [attach.opening for attach in s.detokenizer.attached] == [b"", OPENING]


async def test_the_successor_learns_how_many_tokens_were_certainly_sent() -> None:
    async with scene() as s:
        s.executor.free_running = False
        say(s, "detok")
        await work(s, 20)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        s.executor.run()
        await s.detokenizer.until(lambda: s.scheduler.heartbeat().step > 0)
        beat = s.scheduler.heartbeat()
        say(s, "detok", step=beat.step - 1, term=beat.term)
        await s.bus.flush()
        async with successor(s) as second:
            end(s, "detok")
            await second.until(lambda: bool(second.attached))
            attach = second.attached[0]
            assert unpack(attach.sent) == [len(unpack(attach.tokens[0])) - 1]


async def test_a_detokenizer_that_has_missed_tokens_is_attached_again() -> None:
    async with scene() as s:
        await run_first_step(s)
        first = s.detokenizer.attached[0]
        for sequence, held in ((first.first_sequence, 1), (first.first_sequence + 50, 0)):
            request = encode(AbortSequences(first.term, pack([sequence]), AbortReason.LOST_TOKENS))
            reply = await s.bus.request(f"{subjects.ABORT}.sched.abort", request, timeout=2)
            assert Decoder(AbortedSequences).decode(reply.data).known == held
        await s.detokenizer.until(lambda: len(s.detokenizer.attached) == 2)
        again = s.detokenizer.attached[1]
        assert (again.first_sequence, again.step) == (first.first_sequence, s.scheduler.heartbeat().step)
        assert unpack(again.tokens[0]) == generate(PROMPT, 20, [])[: len(unpack(again.tokens[0]))]
        assert s.load("running") == 1


async def test_tokens_that_are_missed_right_behind_an_attachment_are_not_forgotten() -> None:
    """The scheduler reads the answer and the wish at once, before it goes on with the answer."""
    async with scene() as s:
        await run_first_step(s)
        async with successor(s) as second:
            second.lose_tokens = 1
            end(s, "detok")
            await second.until(lambda: len(second.attached) == 2)
            moved, again = second.attached
            assert moved.step == s.scheduler.heartbeat().step
            assert again.step == moved.step
            s.executor.free_running = True
            s.executor.run()
            await second.until(lambda: second.tokens[again.first_sequence] == generate(PROMPT, 20, []))


async def test_a_request_whose_client_has_another_detokenizer_is_attached_there_behind_the_present_answer() -> None:
    async with scene() as s:
        s.executor.free_running = False
        asked: list[Message] = []
        silent = await s.bus.subscribe(f"{subjects.DETOKENIZER}.slow.attach", asked.append)
        say(s, "slow")
        await work(s, 20, "slow")
        await until(lambda: asked)
        async with successor(s) as second:
            await work(s, 20, "next")
            await until(lambda: s.scheduler._manager.requests["r"].detokenizer == "next")
            s.bus.publish(asked[0].reply, encode(Attached(AttachState.OPEN, (b"",), b"")))
            await second.until(lambda: bool(second.attached))
            assert second.attached[0].order > Decoder(Attach).decode(asked[0].data).order
            s.executor.free_running = True
            await second.until(lambda: second.tokens[second.attached[0].first_sequence] == generate(PROMPT, 20, []))
        await silent.unsubscribe()


async def test_log_probabilities_are_generated_again_for_another_detokenizer() -> None:
    async with scene() as s:
        s.executor.free_running = False
        await work(s, 20, logprobs=0)
        await s.detokenizer.until(lambda: bool(s.executor.plans))
        s.executor.run()
        await s.detokenizer.until(lambda: s.scheduler.heartbeat().step > 0)
        async with successor(s) as second:
            await work(s, 20, "next", logprobs=0)
            await second.until(lambda: len(second.attached) == 2)
            again = second.attached[1]
            assert (again.step, again.move) == (NEW, 1)
            s.executor.free_running = True
            s.executor.run()
            await second.until(lambda: second.tokens[again.first_sequence][-20:] == generate(PROMPT, 20, []))
