import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from pagewire.services.tokenizer import request_encoder, service
from pagewire.services.tokenizer.dispatch import dispatcher, store_monitor
from pagewire.services.tokenizer.encoder import Encoder
from pagewire.services.tokenizer.input_processor import InputProcessor
from pagewire.services.tokenizer.other_models import ORIGINAL
from pagewire.services.tokenizer.request_tasks import MAX_REQUESTS
from pagewire.services.tokenizer.service import Tokenizer
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import ConfigurationError, NoResponders, StorageRefused
from pagewire.shared.messages import Decoder, encode, unpack
from pagewire.shared.messages.backlog import Backlog
from pagewire.shared.messages.client import ErrorFrame, ModelInfo, ModelList
from pagewire.shared.messages.client_headers import BATCH_INBOX, FRESH
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.open import Encoding, OpenState
from pagewire.shared.messages.tokenize import TokenizeReply
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.rendezvous import rank
from pagewire.shared.sampling_parameters import unpack_record
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import tracing
from pagewire.shared.wire_version import WIRE_VERSION
from tests.services.tokenizer.harness import GENERATE, MODEL, FakeDetokenizer, Setup, serving
from tests.support.model_folders import SIMPLE_TEMPLATE, change, model_folder
from tests.support.switched_store import switched_broker
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

MSGPACK = {"content-type": "application/msgpack"}


def ids(text: str) -> list[int]:
    encoded: list[int] = load_tokenizer(BUNDLED).backend.encode(text).ids
    return encoded


async def test_a_text_becomes_a_work_item() -> None:
    async with serving() as setup:
        before = time.time()
        background = subjects.work_queue(MODEL, 4, subjects.ANY)
        body = {"prompt": "Once upon a time", "timeout_ms": 5000, "priority": 4}
        work, item = await setup.send(body, queue=background)
        (opening,) = setup.detokenizer.opened
        assert subjects.is_token(work.request_id)
        assert work.request_id == opening.request_id
        assert [unpack(prompt) for prompt in work.prompts] == [ids("Once upon a time")]
        assert (work.detokenizer, work.n, work.priority) == ("detok1", 1, 4)
        assert before + 4 < work.deadline <= time.time() + 5
        assert work.sampling.max_tokens == 16
        assert unpack(work.sampling.stop_ids) == [0]
        assert subjects.is_client_inbox(opening.reply)
        assert (opening.encoding, opening.stream) == (Encoding.JSON, False)
        assert 4000 < opening.timeout_ms <= 5000
        assert item.headers == {}  # tracing is off


@pytest.mark.parametrize(
    ("named", "headers", "fresh"),
    [({}, {}, True), ({"request_id": "mine"}, {}, False), ({"request_id": "mine"}, {FRESH: "1"}, True)],
)
async def test_an_id_is_fresh_when_it_is_drawn_here_or_the_client_says_so(
    named: dict[str, str], headers: dict[str, str], fresh: bool
) -> None:
    async with serving() as setup:
        await setup.send({"prompt": "x", **named}, headers)
        assert [opening.fresh for opening in setup.detokenizer.opened] == [fresh]


@pytest.mark.parametrize(
    ("headers", "passed"),
    [
        ({}, ""),
        ({BATCH_INBOX: "_INBOX.a.1"}, "_INBOX.a.1"),
        ({BATCH_INBOX: "pagewire.svc.steps.e1"}, ""),
        ({BATCH_INBOX: "_INBOX.*"}, ""),
        ({BATCH_INBOX: "_INBOX." + "x" * 5000}, ""),
    ],
)
async def test_a_batch_inbox_of_a_client_is_passed_on(headers: dict[str, str], passed: str) -> None:
    async with serving() as setup:
        await setup.send({"prompt": "x", "stream": True}, headers)
        assert [opening.batch_inbox for opening in setup.detokenizer.opened] == [passed]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a b", "c"], [ids("a b"), ids("c")]),
        ("x " * 900, [ids("x " * 900)]),
    ],
)
async def test_every_kind_of_prompt_becomes_a_work_item(prompt: object, expected: list[list[int]]) -> None:
    async with serving() as setup:
        work, _ = await setup.send({"prompt": prompt})
        assert [unpack(ids) for ids in work.prompts] == expected
        assert unpack(setup.detokenizer.opened[0].prompt_lengths) == list(map(len, expected))


async def test_a_conversation_becomes_a_work_item(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / MODEL, template=SIMPLE_TEMPLATE)

    async with serving(Settings(model=str(folder))) as setup:
        work, _ = await setup.send({"messages": [{"role": "user", "content": "hi"}]})
        assert unpack(work.prompts[0]) == ids("<user>hi\n<assistant>")


async def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    async with serving(Settings(model=str(model_folder(tmp_path / MODEL)))) as setup:
        frame = await setup.refused({"messages": [{"role": "user", "content": "x"}]})
        assert (frame.code, frame.error) == (400, "invalid_request")
        assert "no chat template: send a prompt" in frame.message


async def test_every_field_of_a_conversation_reaches_the_template() -> None:
    template = "{{ messages | tojson }}{{ add_generation_prompt }}{{ mood }}"
    turn = {"role": "assistant", "content": "Hi."}
    async with serving(Settings(model="bundled", chat_template=template)) as setup:

        async def laid_out(**fields: object) -> list[int]:
            work, _ = await setup.send({"messages": [turn], **fields})
            return unpack(work.prompts[0])

        assert await laid_out() == ids('[{"role": "assistant", "content": "Hi."}]True')
        assert await laid_out(add_generation_prompt=False) == ids('[{"role": "assistant", "content": "Hi."}]False')
        assert await laid_out(chat_template_kwargs={"mood": "!"}) == ids(
            '[{"role": "assistant", "content": "Hi."}]True!'
        )
        both = {"messages": [turn], "continue_final_message": True, "add_generation_prompt": True}
        assert "exclude each other" in (await setup.refused(both)).message
        for name in ("messages", "tools", "add_generation_prompt"):
            reserved = {"messages": [turn], "chat_template_kwargs": {name: []}}
            assert f"cannot have {name}" in (await setup.refused(reserved)).message


async def test_the_last_message_can_be_continued() -> None:
    async with serving() as setup:
        turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Once upon"}]
        work, _ = await setup.send({"messages": turns, "continue_final_message": True})
        assert unpack(work.prompts[0]) == ids("User: Hi.\nAssistant: Once upon")


async def test_a_hostile_template_holds_up_no_other_request() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    async with serving(Settings(model="bundled", chat_template=endless)) as setup:
        asking = asyncio.create_task(setup.refused({"messages": [{"role": "user", "content": "x"}]}))
        for _ in range(20):
            await setup.send({"prompt": "x"})
            assert not asking.done()
        assert "takes more than" in (await asking).message


async def test_fields_left_out_come_from_the_models_generation_config(tmp_path: Path) -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 30, "do_sample": True}
    change(model_folder(tmp_path / MODEL) / "generation_config.json", **own)

    async with serving(Settings(model=str(tmp_path / MODEL))) as setup:

        async def resolved(**sampling: object) -> tuple[float, ...]:
            work, _ = await setup.send({"prompt": "x", "sampling": sampling})
            chosen = unpack_record(work.sampling.record)
            return (
                *(chosen[name].item() for name in ("temperature", "top_p", "top_k", "min_p")),
                work.sampling.max_tokens,
            )

        assert await resolved() == (0.6, 0.9, 20, 0.1, 30)
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 16}
        assert await resolved(**neutral) == (1.0, 1.0, 0, 0.0, 16)
        assert await resolved(temperature=0.3, max_tokens=None) == (0.3, 0.9, 20, 0.1, 30)
        assert await resolved(max_tokens=40, top_k=-1) == (0.6, 0.9, 0, 0.1, 40)
        assert await resolved(beam_width=2) == (0.0, 1.0, 0, 0.0, 16)
        body = msgspec.msgpack.encode({"prompt": "x", "sampling": {"temperature": 1.0}})
        assert unpack_record((await setup.send(body, MSGPACK))[0].sampling.record)["temperature"] == 1.0
    async with serving(Settings(model=str(tmp_path / MODEL), generation_config="vllm")) as setup:
        work, _ = await setup.send({"prompt": "x"})
        chosen = unpack_record(work.sampling.record)
        assert (chosen["temperature"].item(), chosen["top_k"].item(), work.sampling.max_tokens) == (1.0, 0, 16)


async def test_messagepack_and_stream_are_passed_on() -> None:
    async with serving() as setup:
        body = msgspec.msgpack.encode({"prompt": "x", "stream": True, "request_id": "mine"})
        work, _ = await setup.send(body, MSGPACK)
        (opening,) = setup.detokenizer.opened
        assert work.request_id == opening.request_id == "mine"
        assert (opening.encoding, opening.stream) == (Encoding.MSGPACK, True)


async def test_without_max_tokens_the_context_is_the_limit() -> None:
    async with serving(Settings(model="bundled", max_model_len=50)) as setup:
        work, _ = await setup.send({"prompt": [1] * 20, "sampling": {"max_tokens": None}})
        assert work.sampling.max_tokens == 30


async def test_a_models_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / MODEL)
    change(folder / "generation_config.json", eos_token_id=[0, 9])

    async with serving(Settings(model=str(folder))) as setup:
        work, _ = await setup.send({"prompt": "x", "sampling": {"stop_token_ids": [5]}})
        assert unpack(work.sampling.stop_ids) == [0, 5, 9]
        work, _ = await setup.send({"prompt": "x", "sampling": {"ignore_eos": True}})
        assert work.sampling.stop_ids == b""


async def test_absent_seeds_are_drawn_unless_the_deployment_has_one() -> None:
    async def seeds(configured: int) -> set[int]:
        async with serving(Settings(model="bundled", seed=configured)) as setup:
            return {(await setup.send({"prompt": "x"}))[0].sampling.seed for _ in range(3)}

    assert len(await seeds(0)) == 3
    assert len(await seeds(7)) == 1
    assert await seeds(7) == await seeds(7) != await seeds(8)


@pytest.mark.parametrize(
    ("body", "code", "kind", "named"),
    [
        ({}, 400, "invalid_request", "exactly one"),
        ({"prompt": "x", "messages": []}, 400, "invalid_request", "exactly one"),
        ({"prompt": ""}, 400, "invalid_request", "prompt 0 is empty"),
        ({"prompt": ["x", ""]}, 400, "invalid_request", "prompt 1 is empty"),
        ({"prompt": [1, "x"]}, 400, "invalid_request", "several kinds"),
        ({"prompt": [3072]}, 400, "invalid_request", "vocabulary of 3072"),
        ({"prompt": [-1]}, 400, "invalid_request", "vocabulary of 3072"),
        ({"prompt": "x", "temperature": 1}, 400, "invalid_request", "temperature"),
        ({"prompt": "x", "sampling": {"temperature": 3}}, 400, "invalid_request", "temperature"),
        ({"prompt": "x", "sampling": {"n": 2, "temperature": 0}}, 400, "invalid_request", "n must be 1"),
        ({"prompt": "x", "request_id": "a.b"}, 400, "invalid_request", "request_id"),
        ({"messages": []}, 400, "invalid_request", "messages is empty"),
        ({"messages": [{"role": "user"}]}, 400, "invalid_request", "$.messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "invalid_request", "the role wizard"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "invalid_request", "tools"),
        ({"prompt": [1] * 2048}, 422, "context_length", "2048"),
        ({"prompt": [1] * 2047}, 422, "context_length", "at most 1"),
        ({"prompt": "x " * 3000}, 422, "context_length", "2048"),
        ({"prompt": "x", "sampling": {"max_tokens": 1000, "n": 200}}, 413, "payload_too_large", "max_tokens"),
        ({"prompt": [2**64]}, 400, "invalid_request", "prompt 0 has token"),
        ({"prompt": "x", "sampling": {"max_tokens": 2**64}}, 400, "invalid_request", "max_tokens"),
        ({"prompt": "x", "sampling": {"top_k": 2**64}}, 400, "invalid_request", "top_k"),
        ({"prompt": "x", "sampling": {"n": 2**64}}, 400, "invalid_request", "n has an integer"),
        ({"prompt": "x", "sampling": {"seed": 2**64}}, 400, "invalid_request", "seed"),
        ({"prompt": "x", "sampling": {"stop_token_ids": [2**64]}}, 400, "invalid_request", "stop_token_ids"),
        (
            b'{"prompt": "x", "sampling": {"structured_outputs": {"json": ' + b'{"a":' * 50_000,
            400,
            "invalid_request",
            "nested",
        ),
        (b"{", 400, "invalid_request", "JSON"),
        (b"", 400, "invalid_request", "JSON"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(body: object, code: int, kind: str, named: str) -> None:
    async with serving() as setup:
        frame = await setup.refused(body)
        assert (frame.code, frame.error, frame.retryable, frame.tokens_emitted) == (code, kind, False, 0)
        assert named in frame.message
        assert setup.detokenizer.opened == []
        assert await setup.stored() == 0


async def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_reason() -> None:
    async with serving() as setup:
        frame = await setup.refused({"prompt": "x", "sampling": {"structured_outputs": {"regex": "(a"}}})
        assert frame.code == 400
        assert "structured_outputs.regex cannot be compiled" in frame.message
        assert "unclosed group" in frame.message
        assert setup.detokenizer.opened == []
        work, _ = await setup.send({"prompt": "x", "sampling": {"structured_outputs": {"choice": ["a", "b"]}}})
        assert work.sampling.grammar == 'start: "a" | "b"'


async def test_a_request_too_large_for_the_broker_is_refused_unpublished() -> None:

    async with serving(max_payload=20_000) as setup:
        frame = await setup.refused({"prompt": [1] * 1000, "sampling": {"max_tokens": 400}})
        assert frame.code == 413
        assert setup.detokenizer.opened == []


async def test_a_request_for_a_model_of_another_wire_version_is_passed_on() -> None:
    passed: list[tuple[str, str]] = []
    async with serving() as setup:
        bus = MemoryBus(setup.broker)
        subject = f"{subjects.FORWARD}.generate.newer"
        await bus.subscribe(subject, lambda message: passed.append((message.headers[ORIGINAL], message.reply)))
        unreadable = bytes([WIRE_VERSION + 1]) + b"whatever its services say"
        bus.publish(f"{subjects.HEARTBEAT}.tokenizer.t9", unreadable)
        await bus.flush()
        bus.publish(f"{subjects.GENERATE}.newer", b"{}", reply="_INBOX.x.1")
        await until(lambda: bool(passed))
    assert passed == [(f"{subjects.GENERATE}.newer", "_INBOX.x.1")]


async def test_every_tokenizer_lists_the_models_in_one_order() -> None:
    orders = []
    for own, other in (("alpha", "beta"), ("beta", "alpha")):
        async with serving(Settings(model="bundled", served_model_name=f"{own},a-{own}")) as setup:
            bus = MemoryBus(setup.broker)
            infos = [ModelInfo(name, "", 64, "", root=other) for name in (other, f"a-{other}")]
            infos.append(ModelInfo(f"adapter-{other}", "", 64, "", root="0f", parent=other))
            beat = Heartbeat("tokenizer", "t9", True, 0, 0, 0, {}, model=other, models=tuple(infos))
            bus.publish(f"{subjects.HEARTBEAT}.tokenizer.t9", encode(beat))
            await bus.flush()
            reply = await setup.ask({}, subject=subjects.MODELS)
            orders.append([info.name for info in msgspec.json.decode(reply.data, type=ModelList).models])
    assert orders[0] == ["alpha", "a-alpha", "beta", "a-beta", "adapter-beta"]
    assert orders[1] == ["alpha", "a-alpha", "adapter-alpha", "beta", "a-beta"]


async def test_another_model_is_not_found() -> None:
    async with serving() as setup:
        for verb in (subjects.GENERATE, subjects.TOKENIZE):
            frame = await setup.refused({"text": "x"}, subject=f"{verb}.other")
            assert (frame.code, frame.error) == (404, "model_not_found")
            assert MODEL in frame.message


@pytest.mark.parametrize(("state", "code"), [(OpenState.CONFLICT, 409), (OpenState.FULL, 429)])
async def test_the_detokenizers_refusals_reach_the_client(state: OpenState, code: int) -> None:
    async with serving() as setup:
        setup.detokenizer.state = state
        frame = await setup.refused({"prompt": "x", "request_id": "mine"})
        assert (frame.code, frame.request_id) == (code, "mine")
        assert (frame.retry_after_ms is not None) == (code == 429)


async def test_without_a_detokenizer_the_service_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.services.tokenizer.dispatch.dispatcher.SUCCESSOR_TIMEOUT", 0.1)
    async with serving() as setup:
        setup.detokenizer.beat(ready=False)
        frame = await setup.refused({"prompt": "x"})
        assert (frame.code, frame.error, frame.retryable) == (503, "unavailable", True)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_that_no_context_could_hold_is_not_encoded(monkeypatch: pytest.MonkeyPatch, chat: bool) -> None:
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: 1 / 0)
    text = "word " * 100_000
    async with serving() as setup:
        frame = await setup.refused({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text})
    assert (frame.code, frame.error) == (422, "context_length")
    assert "characters" in frame.message


async def test_a_request_past_its_deadline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_encoder, "check_texts", lambda *_: None)  # the encoding shall take longer
    async with serving() as setup:
        frame = await setup.refused({"prompt": "word " * 100_000, "timeout_ms": 1})
        assert (frame.code, frame.error) == (408, "deadline_exceeded")


async def test_an_error_ends_a_stream_with_the_empty_message() -> None:
    async with serving() as setup:
        replies = await collect(setup, {"prompt": "x", "stream": True, "request_id": "mine", "nonsense": 1}, 2)
        assert msgspec.json.decode(replies[0].data, type=ErrorFrame).request_id == "mine"
        assert replies[1].data == b""


async def test_an_error_without_a_stream_is_one_reply() -> None:
    async with serving() as setup:
        replies = await collect(setup, {"prompt": "x", "nonsense": 1}, 2)
        assert len(replies) == 1


async def test_errors_are_encoded_as_the_request_was() -> None:
    async with serving() as setup:
        reply = await setup.ask(msgspec.msgpack.encode({"promt": "x"}), headers=MSGPACK)
        assert msgspec.msgpack.decode(reply.data, type=ErrorFrame).code == 400


async def test_an_accepted_request_gets_nothing_from_the_tokenizer() -> None:
    async with serving() as setup:
        for state in (OpenState.OPENED, OpenState.ATTACHED):
            setup.detokenizer.state = state
            assert await collect(setup, {"prompt": "x", "stream": True}, 1) == []


@pytest.mark.parametrize(
    "reply",
    ["", "pagewire.svc.claim", "_SVC.abc", GENERATE, "$JS.API.STREAM.DELETE.work", "_INBOX", "_INBOX." + "x" * 249],
)
@pytest.mark.parametrize(
    "verb", [GENERATE, f"{subjects.GENERATE}.other", f"{subjects.TOKENIZE}.{MODEL}", subjects.MODELS]
)
async def test_a_reply_subject_that_is_no_inbox_is_dropped_and_counted(verb: str, reply: str) -> None:

    async with serving() as setup:
        heard: list[Message] = []
        if reply:
            await setup.client.subscribe(reply, heard.append)
        setup.client.publish(verb, b'{"prompt": "x"}', reply=reply)
        await setup.until_idle()
        await setup.client.flush()
        assert setup.tokenizer.heartbeat().load["dropped"] == 1
        assert setup.tokenizer.heartbeat().load["requests"] == 0
        assert setup.detokenizer.opened == []
        assert len(heard) == (reply == verb)  # the request itself


async def test_the_same_request_meets_the_same_detokenizer() -> None:
    async with serving() as setup:
        second = await FakeDetokenizer(MemoryBus(setup.broker), "detok2").start()
        await setup.client.flush()
        for number in range(8):
            for _ in range(2):
                work, _ = await setup.send({"prompt": "x", "request_id": f"r{number}"})
                assert work.detokenizer == rank(work.request_id, ["detok1", "detok2"])[0]
        assert setup.detokenizer.opened
        assert second.opened


@pytest.mark.parametrize(
    "field",
    [
        '"chat_template_kwargs": {"x": [%d]}',
        '"tools": [{"function": {"name": "f", "parameters": {"x": %d}}}]',
        '"messages": [{"role": "assistant", "tool_calls": [{"x": %d}]}]',
    ],
)
async def test_an_integer_that_no_message_can_hold_is_refused_and_chats_go_on(field: str) -> None:
    async with serving(Settings(model="bundled", tool_call_parser="hermes")) as setup:
        for number in (2**64, -(2**63) - 1):
            body = '{"messages": [{"role": "user", "content": "x"}], ' + field % number + "}"
            frame = await setup.refused(body.encode())
            assert (frame.code, "64 bits" in frame.message) == (400, True)
        await setup.send({"messages": [{"role": "user", "content": "x"}]})


async def test_tools_work_with_a_template_that_shows_no_tools() -> None:
    function = {"name": "f", "parameters": {"properties": {"x": {"pattern": "(?=a)"}}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": function}]}
    async with serving() as setup:
        plain, _ = await setup.send(body | {"tools": []})
        work, _ = await setup.send(body)
        assert len(work.prompts[0]) > len(plain.prompts[0]) + 20
        assert "tool_call" in work.sampling.grammar
        assert "pattern" not in work.sampling.grammar, "no grammar can hold this schema: its arguments are free"
        held, _ = await setup.send(body | {"tools": [{"type": "function", "function": {"name": "f"}}]})
        assert "tool_call" in held.sampling.grammar
    async with serving(Settings(model="bundled", tool_call_parser="none")) as setup:
        frame = await setup.refused(body)
        assert (frame.code, frame.field) == (400, "tools")


async def test_an_internal_fault_is_answered_without_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as setup:
        monkeypatch.setattr(dispatcher, "rank", lambda request_id, instances: 1 / 0)
        frame = await setup.refused({"prompt": "x", "request_id": "mine"})
        assert (frame.code, frame.error, frame.request_id) == (500, "internal", "mine")
        assert "division" not in frame.message
        monkeypatch.undo()
        await setup.send({"prompt": "x"})  # it serves on


async def test_requests_beyond_the_bound_are_refused_with_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "DRAIN_TIMEOUT", 0.1)

    async with serving() as setup:
        setup.detokenizer.deaf = True
        inbox = setup.client.new_inbox()
        for _ in range(MAX_REQUESTS):
            setup.client.publish(GENERATE, b'{"prompt": [1]}', reply=inbox)
        frame = await setup.refused({"prompt": "x"})
        assert (frame.code, frame.error, frame.retryable) == (429, "overloaded", True)
        assert frame.retry_after_ms


@asynccontextmanager
async def queue_of(seconds: float, max_queue_wait: str | None = "10s") -> AsyncIterator[Setup]:
    """A tokenizer behind a queue of that many seconds."""
    async with serving(Settings(model="bundled", max_queue_wait=max_queue_wait)) as setup:
        report = Backlog("s", (0, 0, 0), (0.0, 0.0, 0.0), 10.0, 0.0, stored=(0, round(10 * seconds), 0))
        setup.client.publish(f"{subjects.BACKLOG}.{MODEL}.s", encode(report))
        await setup.client.flush()
        yield setup


async def test_a_request_that_would_wait_too_long_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with queue_of(30) as setup:
        monkeypatch.setattr(InputProcessor, "process", lambda *_: 1 / 0)
        for headers in (None, {FRESH: "1"}):
            body = {"prompt": "x", **({"request_id": "mine"} if headers else {})}
            reply = await setup.ask(body, headers=headers)
            frame = msgspec.json.decode(reply.data, type=ErrorFrame)
            assert (frame.code, frame.error, frame.retryable) == (429, "overloaded", True)
            assert frame.retry_after_ms is not None
            assert 29_000 < frame.retry_after_ms <= 30_100
        assert setup.tokenizer.heartbeat().load["refused"] == 2


async def test_the_deadline_of_the_request_limits_its_wait() -> None:
    async with queue_of(30, max_queue_wait=None) as setup:
        assert (await setup.refused({"prompt": "x", "timeout_ms": 30_000})).code == 429
        await setup.send({"prompt": "x", "timeout_ms": 60_000})
        urgent = subjects.work_queue(MODEL, -1, subjects.ANY)
        await setup.send({"prompt": "x", "timeout_ms": 1000, "priority": -1}, queue=urgent)


async def test_a_deadline_beyond_all_numbers_is_refused_where_there_is_a_queue() -> None:
    async with queue_of(30) as setup:
        setup.detokenizer.state = OpenState.ABSENT
        assert (await setup.refused({"prompt": "x", "timeout_ms": 10**400})).code in {400, 429}


async def test_a_request_that_may_run_already_is_refused_by_its_detokenizer() -> None:
    async with queue_of(30) as setup:
        setup.detokenizer.state = OpenState.ABSENT
        frame = await setup.refused({"prompt": "x", "request_id": "mine"})
        assert (frame.code, frame.request_id) == (429, "mine")
        setup.detokenizer.state = OpenState.ATTACHED
        assert await collect(setup, {"prompt": "x", "request_id": "mine", "stream": True}, 1) == []
        assert [opening.joins for opening in setup.detokenizer.opened] == [True, True]
        assert await setup.stored() == 0


async def test_without_a_limit_a_queue_of_any_length_takes_patient_requests() -> None:
    async with queue_of(3600, max_queue_wait=None) as setup:
        for _ in range(100):
            await setup.send({"prompt": "x", "timeout_ms": 24 * 3600 * 1000})
        assert setup.tokenizer.heartbeat().load["refused"] == 0


async def test_a_full_detokenizer_is_answered_with_the_queues_wait() -> None:
    async with queue_of(30, max_queue_wait=None) as setup:
        setup.detokenizer.state = OpenState.FULL
        frame = await setup.refused({"prompt": "x", "timeout_ms": 3_600_000})
        assert frame.retry_after_ms is not None
        assert 29_000 < frame.retry_after_ms <= 30_300


async def test_the_trace_of_the_client_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    monkeypatch.setattr(tracing, "_on", True)
    trace, caller = "1" * 32, "2" * 16

    async with serving() as setup:
        _, item = await setup.send({"prompt": [1, 2], "request_id": "mine"}, {"traceparent": f"00-{trace}-{caller}-01"})
        await setup.until_idle()
        (span,) = spans.get_finished_spans()
        assert span.name == "receive"
        assert span.parent is not None
        assert format_span_id(span.parent.span_id) == caller
        assert span.context is not None
        assert item.headers == {"traceparent": f"00-{trace}-{format_span_id(span.context.span_id)}-01"}
        assert setup.detokenizer.headers == [item.headers]
        assert span.attributes is not None
        assert (
            span.attributes.items()
            >= {
                "request_id": "mine",
                "prompt_tokens": 2,
                "outcome": "stored",
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": "bundled",
            }.items()
        )


async def test_each_request_is_one_line_in_the_log() -> None:
    async with serving() as setup:
        with capture_logs(processors=[merge_contextvars]) as lines:
            await setup.send({"prompt": [1, 2], "request_id": "good"})
            await setup.refused({"prompt": "", "request_id": "bad"})
            await setup.until_idle()
    assert [(line["event"], line["request_id"], line["outcome"]) for line in lines] == [
        ("request", "good", "stored"),
        ("request", "bad", "invalid_request"),
    ]
    assert lines[0]["prompt_tokens"] == 2


async def test_tokenize_answers_ids_and_refuses_bad_bodies() -> None:
    async with serving() as setup:
        subject = f"{subjects.TOKENIZE}.{MODEL}"
        reply = await setup.ask({"text": "Once upon a time"}, subject=subject)
        assert msgspec.json.decode(reply.data, type=TokenizeReply).token_ids == ids("Once upon a time")
        packed = await setup.ask(msgspec.msgpack.encode({"text": ""}), subject=subject, headers=MSGPACK)
        assert msgspec.msgpack.decode(packed.data, type=TokenizeReply).token_ids == []
        assert (await setup.refused({"texts": "x"}, subject=subject)).code == 400


async def test_ids_that_do_not_fit_into_a_message_are_refused() -> None:
    async with serving(max_payload=20_000) as setup:
        frame = await setup.refused({"text": "z" * 19_000}, subject=f"{subjects.TOKENIZE}.{MODEL}")
        assert frame.code == 413


async def test_models_are_listed_with_their_subject_and_limits() -> None:
    async with serving(Settings(model="bundled", served_model_name="Org/My model", max_model_len=100)) as setup:
        reply = await setup.ask(b"", subject=subjects.MODELS)
        (model,) = msgspec.json.decode(reply.data, type=ModelList).models
        assert (model.name, model.max_model_len) == ("Org/My model", 100)
        assert model.subject == "pagewire.v1.generate.Org_My_model"
        assert len(model.revision) == 12
        frame = await setup.refused({"prompt": ""}, subject=model.subject)
        assert frame.code == 400


async def test_a_tokenizer_is_ready_while_it_can_hand_over_requests() -> None:
    async with serving() as setup:
        assert setup.announced == [False, True], "no detokenizer was there at first"
        setup.detokenizer.beat(ready=False)
        await setup.client.flush()
        assert not setup.tokenizer.heartbeat().ready
        setup.detokenizer.beat()
        await setup.client.flush()
        assert setup.tokenizer.heartbeat().ready
    assert setup.announced == [False, True, False, True, False]
    assert not setup.tokenizer.heartbeat().ready


async def test_requests_in_progress_are_dispatched_before_the_tokenizer_ends() -> None:
    async with serving() as setup:
        setup.client.publish(GENERATE, b'{"prompt": "' + b"word " * 1500 + b'"}', reply=setup.client.new_inbox())
        await setup.client.flush()
    assert await setup.stored() == 1


async def test_a_model_folder_that_cannot_be_used_ends_the_service(tmp_path: Path) -> None:
    tokenizer = Tokenizer(Context(Settings(model=str(tmp_path)), MemoryBus(MemoryBroker()), "tok1", lambda: None))
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        await tokenizer.run()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=60) | st.text(max_size=20).map(str.encode), min_size=1, max_size=8), st.booleans())
def test_no_bytes_stop_the_tokenizer(bodies: list[bytes], packed: bool) -> None:
    async def main() -> None:
        async with serving() as setup:
            for body in bodies:
                reply = await setup.ask(body, headers=MSGPACK if packed else None)
                kind = msgspec.msgpack.decode if packed else msgspec.json.decode
                assert kind(reply.data, type=ErrorFrame).code == 400

    asyncio.run(main())


async def collect(setup: Setup, body: object, count: int) -> list[Message]:
    """Up to `count` replies; fewer once the tokenizer is done with the request."""
    replies: list[Message] = []
    inbox = setup.client.new_inbox()
    await setup.client.subscribe(inbox, replies.append)
    setup.client.publish(GENERATE, msgspec.json.encode(body), reply=inbox)
    await setup.client.flush()
    await setup.until_idle()
    await setup.client.flush()
    assert len(replies) <= count
    return replies


async def test_the_heartbeat_says_that_the_store_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_monitor, "INTERVAL", 0.01)
    broker, store = switched_broker()
    async with serving(broker=broker) as setup:
        await until(lambda: setup.tokenizer.heartbeat().ready)
        store.refusal = StorageRefused("pagewire.work", "insufficient resources")
        await until(lambda: setup.announced[-1:] == [False])
        load = Decoder(Heartbeat).decode(encode(setup.tokenizer.heartbeat())).load
        assert load["store_refuses"] == 1.0
        store.refusal = None
        await until(lambda: setup.announced[-1:] == [True])
        assert setup.tokenizer.heartbeat().load["store_refuses"] == 0.0


class TestDrain:
    """A tokenizer that is about to end, as a client sees it."""

    BODY: ClassVar = {"prompt": "x", "sampling": {"max_tokens": 1}}

    async def test_a_drain_without_a_successor_ends_at_once(self) -> None:
        async with serving() as setup:
            await asyncio.wait_for(setup.tokenizer.drain(), PATIENCE)
            with pytest.raises(NoResponders):
                await setup.ask(self.BODY)

    async def test_a_draining_tokenizer_serves_until_its_successor_is_ready(self) -> None:
        async with serving(follows=Drain.SUCCESSOR) as setup:
            draining = asyncio.create_task(setup.tokenizer.drain())
            await setup.send(self.BODY)
            for ready in (False, True):
                assert not draining.done()
                beat = Heartbeat("tokenizer", "tok2", ready, 0, 0, 0, {})
                setup.client.publish(f"{subjects.HEARTBEAT}.tokenizer.tok2", encode(beat))
                await setup.send(self.BODY)
            await asyncio.wait_for(draining, PATIENCE)
            with pytest.raises(NoResponders):
                await setup.ask(self.BODY)

    async def test_a_draining_tokenizer_dispatches_arrived_requests(self) -> None:
        async with serving() as setup:
            setup.detokenizer.answers_open = False
            setup.client.publish(GENERATE, msgspec.json.encode(self.BODY), reply=setup.client.new_inbox())
            await until(lambda: setup.detokenizer.opened)
            draining = asyncio.create_task(setup.tokenizer.drain())
            await setup.client.flush()
            assert not draining.done()
            await asyncio.wait_for(draining, PATIENCE)
            assert setup.detokenizer.aborted

    async def test_new_requests_are_refused_while_the_stack_stops(self) -> None:
        async with serving(follows=Drain.STOP) as setup:
            draining = asyncio.create_task(setup.tokenizer.drain())
            await asyncio.sleep(0)
            setup.detokenizer.state = OpenState.ABSENT
            for subject, body in ((GENERATE, self.BODY), (f"{subjects.TOKENIZE}.{MODEL}", {"text": "x"})):
                frame = await setup.refused(body, subject=subject)
                assert (frame.code, frame.error, frame.retryable) == (503, "unavailable", True)
                assert "stopping" in frame.message
            assert msgspec.json.decode((await setup.ask({}, subject=subjects.MODELS)).data)["models"]
            assert await setup.stored() == 0
            assert not draining.done(), "the supervisor says when it ends"
            draining.cancel()
            await asyncio.wait({draining})
