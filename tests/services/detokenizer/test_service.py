import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.shared.bus.memory import MemoryBroker
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages import pack
from pagewire.shared.messages.abort import AbortReason
from pagewire.shared.messages.attach import AttachState
from pagewire.shared.messages.client import Accepted, ChatFormat, FinalChoice
from pagewire.shared.messages.client_headers import REFUSED
from pagewire.shared.messages.open import Encoding, OpenState
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from tests.services.detokenizer.rig import END, HELLO, KEY, PROMPT, Reader, finish_hello, ids, rig
from tests.support.switched_store import switched_broker
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

encodings = pytest.mark.parametrize("encoding", Encoding)


@encodings
async def test_a_stream_has_accepted_deltas_final_and_an_empty_message(folder: Path, encoding: Encoding) -> None:
    async with rig(folder) as world:
        ack = await world.store_item()
        reader = await world.open(encoding)
        cancel, resume = (f"pagewire.v1.{verb}.d1.r1.{KEY}" for verb in ("cancel", "resume"))
        assert reader.frames == [Accepted("r1", cancel, resume, PROMPT)]
        await world.attach(ack=ack)
        world.generate(ids("Hello world!"), Finish.LENGTH)
        final = await reader.end()
        assert final.choices == [FinalChoice(0, "length", None)]
        assert msgspec.to_builtins(final.usage) == {
            "prompt_tokens": PROMPT,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "reasoning_tokens": 0,
        }
        assert [(d.start, d.text, d.token_ids) for d in reader.deltas] == [
            (0, "Hello", ids("Hello")),
            (1, " world", ids(" world")),
            (2, "!", ids("!")),
        ]
        assert all(not message.headers for message in reader.messages)
        assert await world.broker.store.get_done("r1")
        await until(lambda: world.ended_items == [ack])


@encodings
async def test_a_request_without_a_stream_gets_one_reply(folder: Path, encoding: Encoding) -> None:
    async with rig(folder) as world:
        reader = await world.open(encoding, stream=False)
        await world.attach()
        world.generate([*ids("Hello world!"), END], Finish.STOP)
        result = await reader.result()
        (choice,) = result.choices
        assert (choice.text, choice.token_ids) == ("Hello world!", [*ids("Hello world!"), END])
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
        assert (result.request_id, result.usage.completion_tokens) == ("r1", 4)


async def test_clients_learn_the_format_of_a_chat(folder: Path) -> None:
    form = ChatFormat("hermes", opened=True)
    broker = MemoryBroker()
    async with rig(folder, broker=broker) as world:
        reader = await world.open(chat_format=form)
        assert reader.accepted.chat_format == form
        await world.attach()
        world.generate(ids("Hello world!"), Finish.LENGTH)
        await reader.end()
    async with rig(folder, broker=broker) as world:  # it knows the request from its record
        again = await world.reader()
        assert await world.open_for(again, stream=False) == OpenState.ATTACHED
        assert (await again.result()).chat_format == form


async def test_json_frames_have_every_field_of_the_interface(folder: Path) -> None:
    async with rig(folder) as world:
        reader = await world.open(stop=("!",))
        await world.attach()
        world.generate(ids("Hi!"))
        await reader.end()
        frames = [msgspec.json.decode(body) for body in reader.bodies[1:-1]]
        times = frames[-1].pop("metrics")
        assert times.keys() == {"queued_time", "prefill_time", "decode_time", "e2e_latency"}
        assert frames == [
            {"type": "delta", "index": 0, "start": 0, "text": "Hi", "token_ids": ids("Hi"), "logprobs": None},
            {"type": "delta", "index": 0, "start": 1, "text": "", "token_ids": ids("!"), "logprobs": None},
            {
                "type": "final",
                "request_id": "r1",
                "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": "!"}],
                "usage": {"prompt_tokens": PROMPT, "completion_tokens": 2, "cached_tokens": 0, "reasoning_tokens": 0},
                "prompt_token_ids": None,
                "prompt_logprobs": None,
            },
        ]


async def test_a_stop_string_ends_the_sequence_at_the_scheduler(folder: Path) -> None:
    async with rig(folder) as world:
        reader = await world.open(stop=(" wor",))
        await world.attach()
        world.generate(ids("Hello world and what the device did not know to be too much"))
        await reader.end()
        assert reader.text() == "Hello"
        assert [d.token_ids for d in reader.deltas] == [ids("Hello"), ids(" world")]
        await until(lambda: world.aborted)
        assert world.aborted == [([100], AbortReason.STOP_STRING)]


async def test_completions_of_two_prompts_end_one_by_one(folder: Path) -> None:
    async with rig(folder) as world:
        reader = await world.open(n=2, prompts=(b"", b""), prompt_lengths=pack([PROMPT, PROMPT]), stop=("!",))
        await world.attach(([], [], [], []))
        for position, rest in enumerate(ids("one two three!")):
            finishes = [Finish.LENGTH if position == i < 3 else Finish.NONE for i in range(4)]
            world.step(*((100 + i, position, rest, finish) for i, finish in enumerate(finishes)))
        final = await reader.end()
        assert [c.finish_reason for c in final.choices] == ["length", "length", "length", "stop"]
        assert final.choices[3].stop_reason == "!"
        assert [reader.text(i) for i in range(4)] == ["one", "one two", "one two three", "one two three"]
        for index in range(4):
            assert [d.start for d in reader.deltas if d.index == index] == list(range(index + 1))
        assert final.usage.prompt_tokens == 2 * PROMPT
        await until(lambda: world.aborted)
        assert world.aborted == [([103], AbortReason.STOP_STRING)]


async def test_cached_tokens_are_the_positions_before_the_first_row(folder: Path) -> None:
    async with rig(folder) as world:
        reader = await world.open()
        await world.attach()
        for step, (start, count, token, finish) in enumerate([(2, 2, NO_TOKEN, 0), (4, 1, 5, Finish.LENGTH)]):
            sequence, first, width, sampled = map(pack, ([100], [start], [count], [token]))
            world.publish(StepOutput(1, step, 1, sequence, first, width, sampled, bytes([finish]), 1))
        assert (await reader.end()).usage.cached_tokens == 2


async def test_a_waiting_client_gets_a_message_every_second(folder: Path) -> None:
    async with rig(folder) as world:
        reader = await world.open()
        silent = await world.open(request_id="r2", stream=False)
        await until(lambda: reader.queued == 2)
        await world.attach()
        world.generate(ids("Hi"))
        await until(lambda: reader.deltas)
        heard = reader.queued
        world.generate(ids("!"), Finish.LENGTH, start=1)
        await reader.end()
        assert reader.queued == heard
        assert not silent.messages


@encodings
async def test_the_deadline_ends_a_running_request(folder: Path, encoding: Encoding) -> None:
    async with rig(folder) as world:
        ack = await world.store_item()
        reader = await world.open(encoding, timeout_ms=150)
        await world.attach(ack=ack)
        world.generate(ids("Hello world"))
        error = await reader.error()
        assert (error.code, error.error, error.retryable, error.tokens_emitted) == (
            408,
            "deadline_exceeded",
            True,
            2,
        )
        await until(lambda: reader.over)
        assert reader.messages[-2].headers["Nats-Service-Error-Code"] == "408"
        assert "timeout_ms" in reader.messages[-2].headers["Nats-Service-Error"]
        await until(lambda: world.aborted)
        assert world.aborted == [([100], AbortReason.DEADLINE)]
        await until(lambda: world.ended_items == [ack])


async def test_the_deadline_ends_a_request_that_was_never_admitted(folder: Path) -> None:
    async with rig(folder) as world:
        reader = await world.open(timeout_ms=50, stream=False)
        error = await reader.error()
        assert (error.code, error.tokens_emitted, error.request_id) == (408, 0, "r1")
        assert len(reader.messages) == 1


async def test_an_abort_ends_the_stream_with_its_error(folder: Path) -> None:
    async with rig(folder) as world:
        reader = await world.open()
        await world.abort("r1", "unavailable", "the queue is away")
        error = await reader.error()
        assert (error.code, error.message, error.retryable) == (503, "the queue is away", True)
        await until(lambda: reader.over)
        await world.abort("never-heard-of", "unavailable", "x")


@pytest.mark.parametrize("stored", [True, False])
async def test_an_error_ends_only_a_request_that_was_accepted_here(folder: Path, stored: bool) -> None:
    """Else it may run elsewhere, where an earlier attempt has brought it."""
    async with rig(folder) as world:
        reader = await world.reader()
        await world.open_for(reader, stored=stored)
        await world.abort("r1", "unavailable", "the queue is away")
        await reader.error()
        await until(lambda: reader.over)
        assert (REFUSED in reader.messages[-2].headers) is not stored


async def test_a_stopping_service_ends_no_stream_that_another_one_continues(folder: Path) -> None:
    readers: list[Reader] = []
    broker = MemoryBroker()
    async with rig(folder, broker=broker) as world:
        readers.extend([await world.open(request_id=f"r{i}", stream=bool(i % 2)) for i in range(4)])
    for number, reader in enumerate(readers):
        assert reader.last is None
        assert await broker.store.get_done(f"r{number}") is None


async def test_a_full_detokenizer_refuses_new_streams_and_attaches_known_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.services.detokenizer.state.registry.MAX_OPEN", 2)

    async with rig(folder) as world:
        for name in ("r1", "r2"):
            await world.open(request_id=name)
        reader = await world.reader()
        assert await world.open_for(reader, request_id="r3") == OpenState.FULL
        assert await world.open_for(reader, request_id="r2") == OpenState.ATTACHED


async def test_a_result_too_large_for_a_message_ends_with_413(folder: Path) -> None:
    async with rig(folder, broker=MemoryBroker(max_payload=4096)) as world:
        reader = await world.open(stream=False)
        await world.attach()
        world.generate(ids(" word" * 800), Finish.LENGTH)
        error = await reader.error()
        assert (error.code, error.error, error.tokens_emitted) == (413, "payload_too_large", 800)


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=2), st.booleans(), st.integers(0, 3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_deltas_of_a_stream_join_to_the_result(
    folder: Path, text: str, stops: list[str], include: bool, min_tokens: int
) -> None:
    tokens = [*ids(text), END]
    request: dict[str, Any] = {"stop": (*stops, text[2:4] or "x"), "include_stop": include, "min_tokens": min_tokens}

    async def main() -> None:
        async with rig(folder) as world:
            streaming = await world.open(**request)
            whole = await world.open(request_id="r2", stream=False, **request)
            await world.attach()
            await world.attach(request_id="r2", first_sequence=200)
            world.generate(tokens, Finish.STOP)
            world.generate(tokens, Finish.STOP, sequence=200)
            final, result = await streaming.end(), await whole.result()
            (choice,) = result.choices
            assert streaming.text() == choice.text
            assert [d.token_ids[0] for d in streaming.deltas] == choice.token_ids
            assert [d.start for d in streaming.deltas] == list(range(len(choice.token_ids)))
            assert final.choices == [FinalChoice(0, choice.finish_reason, choice.stop_reason)]
            assert final.usage == result.usage

    asyncio.run(main())


async def test_the_heartbeat_has_term_step_and_load(folder: Path) -> None:
    async with rig(folder) as world:
        reader = await world.open()
        await world.attach(term=7)
        world.step((100, 0, ids("Hi")[0], Finish.LENGTH), step=3, term=7)
        await reader.end()
        beat = world.service.heartbeat()
        assert (beat.service, beat.ready, beat.term, beat.step) == ("detokenizer", True, 7, 3)
        assert beat.reads == {7: 3}
        assert beat.load["tokens"] == 1
        assert beat.load["frames"] == 3


async def test_the_work_of_a_dead_scheduler_is_delivered_again_at_once(folder: Path) -> None:
    async with rig(folder, broker=MemoryBroker(ack_wait=60)) as world:
        ack = await world.store_item()
        await world.open()
        await world.attach(ack=ack)
        world.bus.publish("pagewire.svc.heartbeat.scheduler.other", b"")
        await world.bus.flush()
        assert await world.broker.store.pull_work("m", 1, expires=0.05) == []
        world.bus.publish("pagewire.svc.heartbeat.scheduler.s1", b"")
        (item,) = await world.broker.store.pull_work("m", 1, expires=5)
        assert item.deliveries == 2


async def test_a_request_that_kills_five_schedulers_ends_with_an_error(folder: Path) -> None:
    """A new token in between shows that it was chance."""
    async with rig(folder) as world:

        async def attach(number: int) -> int:
            world.scheduler_ended(f"s{number - 1}")
            await world.bus.flush()
            return (await world.attach(scheduler=f"s{number}", term=number, generation=number)).state

        reader = await world.open()
        for number in range(1, 6):
            assert await attach(number) == AttachState.OPEN
        world.step((100, 0, ids("Hi")[0], Finish.NONE), step=0, term=5)
        await until(lambda: reader.deltas)
        for number in range(6, 10):
            assert await attach(number) == AttachState.OPEN
        assert reader.last is None
        assert await attach(10) == AttachState.ENDED
        error = await reader.error()
        assert (error.code, error.error) == (500, "internal")


@pytest.mark.parametrize("silent", [False, True])
async def test_a_full_store_delays_the_last_frame_by_a_second(folder: Path, silent: bool) -> None:
    broker, store = switched_broker()
    async with rig(folder, broker=broker) as world:
        ack = await world.store_item()
        reader = await world.open()
        await world.attach(ack=ack)
        store.refusal, store.silent = (None, True) if silent else (BusUnavailable("insufficient resources"), False)
        world.generate(HELLO, Finish.LENGTH)
        async with asyncio.timeout(PATIENCE):
            await reader.end()
        await until(lambda: world.ended_items == [ack])
        assert (world.load["records_failed"], world.load["records_waiting"]) == (1, 1)

        again = await world.reader()
        assert await world.open_for(again) == OpenState.ATTACHED
        await again.end()
        assert again.bodies[1:] == reader.bodies[1:]

        redelivered = await world.attach(ack="$JS.ACK.memory.m.0.1", generation=2)
        assert redelivered.state == AttachState.ENDED
        await until(lambda: len(world.ended_items) == 2)

        store.refusal, store.silent = None, False
        await until(lambda: not world.load["records_waiting"])
        assert await store.get_done("r1")


async def test_a_request_that_no_service_could_take_may_be_sent_again(folder: Path) -> None:
    """The error is retryable: the same request id starts a new stream."""
    async with rig(folder) as world:
        reader = await world.open()
        await world.abort("r1", "unavailable", "the store is full")
        assert (await reader.error()).code == 503
        assert await world.broker.store.get_done("r1") is None, "a scheduler would drop the work of the new stream"
        again = await world.open()
        await finish_hello(world)
        await again.end()
        assert again.text()
