"""The public interface as a client sees it that uses nothing but nats-py."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from pagewire.bench.shapes import write_folder
from pagewire.services.detokenizer.frames import disconnect_monitor
from pagewire.services.tokenizer.request_tasks import MAX_BYTES, RequestTasks
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.interpreted import interpreted
from tests.support.pipeline import Pipeline, running
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio

SETTINGS = Settings(
    model=str(checkpoint("llama")),
    served_model_name="my model/1",
    dtype="float32",
    max_model_len=96,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_kv_blocks=64,
    log_level="error",
)
SUBJECT = "pagewire.v1.generate.my_model_1"
Frames = list[dict[str, Any]]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.full)])
def settings(request: pytest.FixtureRequest) -> Iterator[Settings]:
    with interpreted():
        yield msgspec.structs.replace(SETTINGS, device=request.param)


@pytest.fixture
async def pipeline(settings: Settings) -> AsyncIterator[Pipeline]:
    async with running(settings) as pipeline:
        yield pipeline
        await pipeline.until_idle()


@pytest.fixture
async def client(pipeline: Pipeline) -> AsyncIterator[Client]:
    client = await nats.connect(pipeline.url)
    yield client
    await client.close()


async def ask(client: Client, body: Any, subject: str = SUBJECT) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = await client.request(subject, data, timeout=PATIENCE)
    answer: dict[str, Any] = json.loads(reply.data)
    if answer.get("type") == "error":
        assert reply.headers is not None
        assert reply.headers["Nats-Service-Error-Code"] == str(answer["code"])
        assert reply.headers["Nats-Service-Error"]
        assert "Traceback" not in answer["message"]
        assert "/" not in answer["message"].replace("my model/1", "")
    return answer


async def stream(
    client: Client, body: dict[str, Any], on_frame: Callable[[dict[str, Any]], Any] = lambda _: None
) -> Frames:
    """All frames of a stream, up to the empty message."""
    inbox = client.new_inbox()
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await client.subscribe(inbox, cb=arrived.put)
    await client.publish(SUBJECT, json.dumps(body | {"stream": True}).encode(), reply=inbox)
    frames: Frames = []
    while (message := await asyncio.wait_for(arrived.get(), PATIENCE)).data:
        frames.append(json.loads(message.data))
        on_frame(frames[-1])
    await subscription.unsubscribe()
    return frames


async def test_a_result_and_a_stream_say_the_same(client: Client) -> None:
    body = {"prompt": "The morning train", "sampling": {"max_tokens": 12, "temperature": 0, "ignore_eos": True}}
    result = await ask(client, body)
    assert result["type"] == "result"
    (choice,) = result["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert len(choice["token_ids"]) == 12
    assert result["usage"]["completion_tokens"] == 12

    frames = await stream(client, body)
    assert frames[0]["type"] == "accepted"
    assert frames[0]["request_id"]
    deltas = [frame for frame in frames if frame["type"] == "delta"]
    assert [frame["start"] for frame in deltas] == list(range(12))
    assert [token for frame in deltas for token in frame["token_ids"]] == choice["token_ids"]
    assert "".join(frame["text"] for frame in deltas) == choice["text"]
    assert frames[-1]["type"] == "final"
    assert frames[-1]["choices"] == [{"index": 0, "finish_reason": "length", "stop_reason": None}]
    assert frames[-1]["usage"]["prompt_tokens"] == result["usage"]["prompt_tokens"]
    assert {frame["type"] for frame in frames} <= {"accepted", "queued", "delta", "final"}


async def test_batches_and_several_completions_have_an_index_each(client: Client) -> None:
    result = await ask(client, {"prompt": ["One", "Two"], "sampling": {"n": 3, "seed": 7, "max_tokens": 4}})
    assert [choice["index"] for choice in result["choices"]] == list(range(6))
    assert result["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in result["choices"])
    frames = await stream(client, {"prompt": ["One", "Two"], "sampling": {"n": 3, "seed": 7, "max_tokens": 4}})
    for choice in result["choices"]:
        mine = [f for f in frames if f["type"] == "delta" and f["index"] == choice["index"]]
        assert [t for f in mine for t in f["token_ids"]] == choice["token_ids"]


async def test_messagepack_is_answered_in_messagepack(client: Client) -> None:
    body = msgspec.msgpack.encode({"prompt": [5, 6, 7], "sampling": {"max_tokens": 3}})
    reply = await client.request(SUBJECT, body, timeout=PATIENCE, headers={"Content-Type": "application/msgpack"})
    assert len(msgspec.msgpack.decode(reply.data)["choices"][0]["token_ids"]) <= 3
    reply = await client.request(SUBJECT, b"\xc1", timeout=PATIENCE, headers={"Content-Type": "application/msgpack"})
    assert msgspec.msgpack.decode(reply.data)["code"] == 400


async def test_models_tokenize_and_detokenize_answer(client: Client) -> None:
    (model,) = (await ask(client, {}, "pagewire.v1.models"))["models"]
    assert model["name"] == "my model/1"
    assert model["subject"] == SUBJECT
    assert model["max_model_len"] == 96
    ids = (await ask(client, {"text": "The train"}, "pagewire.v1.tokenize.my_model_1"))["token_ids"]
    assert (await ask(client, {"token_ids": ids}, "pagewire.v1.detokenize.my_model_1"))["text"] == "The train"
    names = []
    inbox = client.new_inbox()
    done = asyncio.Event()

    async def collect(message: Msg) -> None:
        names.append(json.loads(message.data)["name"])
        if len(names) >= 4:
            done.set()

    await client.subscribe(inbox, cb=collect)
    await client.publish("$SRV.PING", b"", reply=inbox)
    await asyncio.wait_for(done.wait(), PATIENCE)
    assert sorted(names) == [f"pagewire-{name}" for name in ("detokenizer", "executor", "scheduler", "tokenizer")]


BAD_REQUESTS: list[tuple[Any, int, str]] = [
    (b"{", 400, "invalid_request"),
    (b"\xff\x00", 400, "invalid_request"),
    (b"[]", 400, "invalid_request"),
    ({}, 400, "invalid_request"),
    ({"prompt": ""}, 400, "invalid_request"),
    ({"prompt": []}, 400, "invalid_request"),
    ({"prompt": [1, 100_000]}, 400, "invalid_request"),
    ({"prompt": [-1]}, 400, "invalid_request"),
    ({"prompt": "a", "messages": []}, 400, "invalid_request"),
    ({"prompt": "a", "colour": "red"}, 400, "invalid_request"),
    ({"prompt": "a", "sampling": {"temperature": -1}}, 400, "invalid_request"),
    ({"prompt": "a", "sampling": {"top_p": 0}}, 400, "invalid_request"),
    ({"prompt": "a", "sampling": {"max_tokens": 0}}, 400, "invalid_request"),
    ({"prompt": "a", "sampling": {"max_tokens": "many"}}, 400, "invalid_request"),
    ({"prompt": "a", "sampling": {"logprobs": 21}}, 400, "invalid_request"),
    ({"prompt": "a", "request_id": "no spaces"}, 400, "invalid_request"),
    ({"messages": [{"role": "user", "content": "Hello"}]}, 400, "invalid_request"),
    ({"prompt": [5] * 90, "sampling": {"max_tokens": 20}}, 422, "context_length"),
    ({"prompt": [5] * 200}, 422, "context_length"),
]


async def test_bad_requests_get_one_typed_answer_at_once(client: Client) -> None:
    clock = asyncio.get_running_loop().time
    for body, code, error in BAD_REQUESTS:
        before = clock()
        answer = await ask(client, body)
        assert (answer["type"], answer["code"], answer["error"]) == ("error", code, error), str(body)[:80]
        assert answer["retryable"] is False
        assert answer["tokens_emitted"] == 0
        assert clock() - before < 1.0, str(body)[:80]
    frames = await stream(client, {"prompt": "a", "sampling": {"best_of": 3}})
    assert [frame["type"] for frame in frames] == ["error"]
    answer = await ask(client, {"prompt": "a"}, "pagewire.v1.generate.another")
    assert (answer["code"], answer["error"]) == (404, "model_not_found")


async def test_a_cached_prompt_is_found_under_the_same_salt_alone(client: Client) -> None:
    async def cached(salt: str) -> int:
        body = {"prompt": list(range(50, 90)), "cache_salt": salt, "sampling": {"max_tokens": 2}}
        return int((await ask(client, body))["usage"]["cached_tokens"])

    assert [await cached(salt) for salt in ("", "a", "b", "a", "b", "")] == [0, 0, 0, 32, 32, 32]


async def test_the_same_request_id_is_the_same_request(client: Client) -> None:
    body = {"prompt": "One", "request_id": "mine", "sampling": {"max_tokens": 6}}
    first, second = await asyncio.gather(ask(client, body), ask(client, body))
    assert first == second == await ask(client, body)
    answer = await ask(client, body | {"prompt": "Two"})
    assert (answer["code"], answer["error"]) == (409, "duplicate_request")


async def test_a_deadline_ends_a_request_with_408(client: Client) -> None:
    sampling = {"max_tokens": 80, "ignore_eos": True}
    answer = await ask(client, {"prompt": "One", "timeout_ms": 1, "sampling": sampling})
    assert (answer["code"], answer["error"], answer["retryable"]) == (408, "deadline_exceeded", True)


@pytest.fixture
def four_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestTasks.__init__, "__defaults__", (4, MAX_BYTES))


@pytest.mark.usefixtures("four_in_flight")
async def test_too_many_requests_are_refused_with_429_and_a_time(client: Client) -> None:
    body = {"prompt": "One", "sampling": {"max_tokens": 1}}
    answers = await asyncio.gather(*(ask(client, body) for _ in range(60)))
    refused = [answer for answer in answers if answer["type"] == "error"]
    assert 0 < len(refused) < len(answers)
    for answer in refused:
        assert (answer["code"], answer["error"], answer["retryable"]) == (429, "overloaded", True)
        assert answer["retry_after_ms"] > 0


@pytest.mark.parametrize("settings", [Settings(model="bundled", dtype="float32", num_kv_blocks=200, log_level="error")])
async def test_a_result_that_no_message_could_hold_is_refused_with_413(client: Client) -> None:
    body = {"prompt": "One", "sampling": {"n": 256, "max_tokens": 2000}}
    answer = await ask(client, body, "pagewire.v1.generate.bundled")
    assert (answer["code"], answer["error"]) == (413, "payload_too_large")


async def test_a_finished_stream_can_be_read_again_from_any_token(client: Client) -> None:
    frames = await stream(client, {"prompt": "One", "sampling": {"max_tokens": 9, "ignore_eos": True}})
    inbox = client.new_inbox()
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    await client.subscribe(inbox, cb=arrived.put)
    await client.publish(frames[0]["resume"], b'{"start": 4}', reply=inbox)
    again = []
    while (message := await asyncio.wait_for(arrived.get(), PATIENCE)).data:
        again.append(json.loads(message.data))
    expected = [f for f in frames if f["type"] == "final" or (f["type"] == "delta" and f["start"] >= 4)]
    assert [f for f in again if f["type"] in {"delta", "final"}] == expected


async def test_a_reply_subject_that_is_no_inbox_is_never_answered(client: Client, pipeline: Pipeline) -> None:
    """A client may not read there, but a service that answered would publish with its own permissions."""
    received: list[str] = []
    await pipeline.bus.subscribe("pagewire.svc.abort.>", lambda m: received.append(m.subject))
    await pipeline.bus.subscribe("pagewire.v1.models.>", lambda m: received.append(m.subject))
    long = "_INBOX." + "x" * 4000
    await pipeline.bus.subscribe(long, lambda m: received.append(m.subject))
    body = json.dumps({"prompt": "One", "sampling": {"max_tokens": 1}}).encode()
    for reply in ("pagewire.svc.abort.x", "pagewire.v1.models.x", "$JS.API.INFO", long):
        await client.publish(SUBJECT, body, reply=reply)
    await client.publish(SUBJECT, body)
    assert (await ask(client, {"prompt": "One", "sampling": {"max_tokens": 1}}))["type"] == "result"
    assert received == []


class TestOnASlowDevice:
    """A simulated device with steps of 0.2 s, so that even a delayed message arrives within one step."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        write_folder("llama-3-70b", tmp_path)
        return msgspec.structs.replace(SETTINGS, model=str(tmp_path), device="sim:l40s", dtype="auto")

    async def test_cancel_stops_within_two_steps_and_reports_usage(self, client: Client, pipeline: Pipeline) -> None:
        seen_at_cancel: list[int] = []
        replies: list[asyncio.Task[Msg]] = []
        cancel = ""

        def on_frame(frame: dict[str, Any]) -> None:
            nonlocal cancel
            cancel = frame.get("cancel", cancel)
            if frame["type"] == "delta" and frame["start"] == 4:
                seen_at_cancel.append(frame["start"])
                replies.append(asyncio.create_task(client.request(cancel, b"", timeout=PATIENCE)))

        body = {"prompt": "One", "sampling": {"max_tokens": 90, "ignore_eos": True}}
        frames = await stream(client, body, on_frame)
        assert json.loads((await replies[0]).data)["state"] == "cancelled"
        assert frames[-1]["type"] == "final"
        assert frames[-1]["choices"][0]["finish_reason"] == "cancelled"
        deltas = sum(frame["type"] == "delta" for frame in frames)
        assert frames[-1]["usage"]["completion_tokens"] == deltas < 90
        await pipeline.until_idle()
        # The executor has run what the client saw, what was under way, and at most two steps more.
        assert pipeline.load("executor")["sampled"] <= deltas + 2
        again = await client.request(cancel, b"", timeout=PATIENCE)
        assert json.loads(again.data)["state"] == "ended"
        unknown = await client.request(cancel.rsplit(".", 1)[0] + ".nobody", b"", timeout=PATIENCE)
        assert json.loads(unknown.data)["state"] == "unknown"

    async def test_a_client_that_was_killed_costs_no_more_steps(
        self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its connection ends without a cancellation; the broker then reports that its frames have no subscriber."""
        monkeypatch.setattr(disconnect_monitor, "MAX_UNDELIVERED", 2)
        killed = await nats.connect(pipeline.url)
        inbox, received = killed.new_inbox(), asyncio.Event()

        async def on_frame(message: Msg) -> None:
            if json.loads(message.data)["type"] == "delta":
                received.set()

        await killed.subscribe(inbox, cb=on_frame)
        body = {"prompt": "One", "sampling": {"max_tokens": 90, "ignore_eos": True}, "stream": True}
        await killed.publish(SUBJECT, json.dumps(body).encode(), reply=inbox)
        await asyncio.wait_for(received.wait(), PATIENCE)
        await killed.close()
        await pipeline.until_idle()
        assert pipeline.load("executor")["sampled"] < 60
