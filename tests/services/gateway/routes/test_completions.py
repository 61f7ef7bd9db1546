import asyncio
from typing import Any

import msgspec
import pytest

from pagewire.shared import subjects
from pagewire.shared.errors import (
    Cancelled,
    ContextLength,
    DeadlineExceeded,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    Overloaded,
    RequestError,
    invalid_field,
)
from tests.services.gateway.http_client import Answer, Gateway, start_gateway
from tests.support.responder import MODEL, WORDS, deltas, final, settle
from tests.support.waiting import until

TEXT = "".join(WORDS)
pytestmark = pytest.mark.anyio


async def test_a_completion_has_openais_shape(gateway: Gateway) -> None:
    answer = await gateway.post({"model": MODEL, "prompt": "x", "n": 2, "request_id": "r1"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    assert (body["id"], body["object"], body["model"]) == ("cmpl-r1", "text_completion", MODEL)
    assert body["choices"][1] == {
        "index": 1,
        "text": TEXT,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_is_events_and_done(gateway: Gateway) -> None:
    answer = await gateway.post({"model": MODEL, "prompt": "x", "stream": True})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, end = answer.events
    assert "".join(event["choices"][0]["text"] for event in parts) == TEXT
    assert all(event["choices"][0]["finish_reason"] is None for event in parts)
    assert all(event["choices"][0]["text"] for event in parts), "an event without text tells nothing"
    assert end["choices"][0]["finish_reason"] == "length"
    assert len({event["id"] for event in answer.events}) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_a_request_may_choose_its_own_deadline(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    for timeout in (1001, None):
        assert (await gateway.post({"model": MODEL, "timeout_ms": timeout, **body}, path)).status == 200
    assert [request.timeout_ms for request in gateway.responder.requests] == [1001, 600_000]
    for wrong in (0, 10**400, 1.5, "5"):
        refused = await gateway.post({"model": MODEL, "timeout_ms": wrong, **body}, path)
        assert (refused.status, refused.json["error"]["param"]) == (400, "timeout_ms")


async def test_usage_comes_last_with_include_usage(gateway: Gateway) -> None:
    body = {"model": MODEL, "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    *others, last = (await gateway.post(body)).events
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 8
    assert all(event["usage"] is None for event in others)


async def test_every_event_has_the_usage_with_continuous_usage_stats(gateway: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "prompt": "x", "stream": True, "stream_options": options}
    *others, last = (await gateway.post(body)).events
    prompt_tokens = last["usage"]["prompt_tokens"]
    assert {event["usage"]["prompt_tokens"] for event in others} == {prompt_tokens}
    counts = [event["usage"]["completion_tokens"] for event in others]
    assert counts[0] < counts[-1] == last["usage"]["completion_tokens"]
    assert counts == sorted(counts)
    alone = {**body, "stream_options": {"continuous_usage_stats": True}}
    assert all(event["usage"] is None for event in (await gateway.post(alone)).events)


async def test_each_choice_of_a_stream_ends_by_itself(gateway: Gateway) -> None:
    events = (await gateway.post({"model": MODEL, "prompt": "x", "n": 2, "stream": True})).events
    texts = {0: "", 1: ""}
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: TEXT, 1: TEXT}
    assert [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]] == [0, 1]


async def test_a_request_without_a_model_gets_the_only_one(gateway: Gateway) -> None:
    assert (await gateway.post({"prompt": "x"})).json["model"] == MODEL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InvalidRequest("top_k must be at least 1"), "invalid_request_error", "invalid_request"),
        (ContextLength("too long"), "invalid_request_error", "context_length"),
        (DuplicateRequest("taken"), "invalid_request_error", "duplicate_request"),
        (DeadlineExceeded("late"), "invalid_request_error", "deadline_exceeded"),
        (Cancelled("cancelled"), "invalid_request_error", "cancelled"),
        (Internal("a fault"), "server_error", "internal"),
    ],
)
async def test_an_error_of_the_pipeline_has_its_status(
    gateway: Gateway, error: RequestError, kind: str, code: str, stream: bool
) -> None:
    gateway.responder.script = lambda request: [error, None]
    answer = await gateway.post({"model": MODEL, "prompt": "x", "stream": stream})
    assert answer.status == error.code
    expected = {"message": error.message, "type": kind, "code": code}
    assert {name: answer.json["error"][name] for name in expected} == expected


async def test_an_invalid_field_is_named(gateway: Gateway) -> None:
    async def blamed(gateway: Gateway, body: Any) -> Any:
        answer = await gateway.post(body)
        assert answer.status == 400
        return answer.json["error"]["param"]

    assert await blamed(gateway, {"prompt": "x", "guided_json": {}}) == "guided_json"
    assert await blamed(gateway, {"prompt": "x", "max_tokens": "3"}) == "max_tokens"
    assert await blamed(gateway, {"prompt": "x", "suffix": "y"}) == "suffix"
    assert await blamed(gateway, {"max_tokens": 3}) == "prompt"
    assert await blamed(gateway, b"not json") is None
    gateway.responder.script = lambda request: [invalid_field("top_k", "must be at least 1"), None]
    assert await blamed(gateway, {"model": MODEL, "prompt": "x", "top_k": -5}) == "top_k"
    gateway.responder.script = lambda request: [InvalidRequest("a stop string is empty"), None]
    assert await blamed(gateway, {"model": MODEL, "prompt": "x", "stop": [""]}) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", [2**64]),
        ("max_tokens", 2**64),
        ("min_tokens", 2**64),
        ("top_k", 10**25),
        ("n", 2**64),
        ("seed", -(2**63) - 1),
        ("stop_token_ids", [1, 2**64]),
        ("priority", 2**64),
    ],
)
async def test_an_integer_of_more_than_64_bits_is_refused_by_name(gateway: Gateway, field: str, value: Any) -> None:
    answer = await gateway.post({"model": MODEL, "prompt": "x", field: value})
    assert (answer.status, answer.json["error"]["param"]) == (400, field)


@pytest.mark.parametrize("field", ["prompt", "metadata", "structured_outputs"])
async def test_a_body_that_is_nested_too_deeply_is_refused(field: str) -> None:
    gateway = await start_gateway(body_limit=1_000_000)
    nested = '{"a":' * 50_000 + "1" + "}" * 50_000
    answer = await gateway.post(f'{{"model": "{MODEL}", "prompt": "x", "{field}": {nested}}}'.encode())
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


async def test_the_answer_of_an_overloaded_pipeline_has_retry_after(gateway: Gateway) -> None:
    gateway.responder.script = lambda request: [Overloaded("full", retry_after_ms=2400), None]
    answer = await gateway.post({"model": MODEL, "prompt": "x"})
    assert (answer.status, answer.headers["retry-after"]) == (429, "2")
    assert answer.json["error"]["type"] == "rate_limit_error"


async def test_an_error_behind_the_first_token_is_an_event(gateway: Gateway) -> None:
    release = asyncio.Event()
    gateway.responder.script = lambda request: [*deltas()[:1]]
    body = msgspec.json.encode({"model": MODEL, "prompt": "x", "stream": True})
    calling = asyncio.create_task(gateway.call("POST", "/v1/completions", body, {}, slow=release))
    await until(lambda: gateway.responder.requests)
    await settle()
    gateway.responder.send(Internal("a fault"), None)
    release.set()
    answer = await calling
    assert answer.status == 200
    first, error = answer.events
    assert first["choices"][0]["text"] == WORDS[0]
    assert error["error"]["code"] == "internal"


async def test_a_model_that_is_not_served_is_not_found(gateway: Gateway) -> None:
    answer = await gateway.post({"model": "other", "prompt": "x"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


async def test_a_body_beyond_the_brokers_limit_is_refused(gateway: Gateway) -> None:
    assert (await gateway.post({"model": MODEL, "prompt": "x" * 20_000})).status == 413


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_its_request_unless_it_may_send_it_again(
    gateway: Gateway, stream: bool, own: bool
) -> None:
    gone = asyncio.Event()
    gateway.responder.script = lambda request: [*deltas()[:1]] if stream else []
    named = {"request_id": "r5"} if own else {}
    body = msgspec.json.encode({"model": MODEL, "prompt": "x", "stream": stream, **named})
    calling = asyncio.create_task(gateway.call("POST", "/v1/completions", body, {}, gone=gone))
    await until(lambda: gateway.responder.requests)
    await settle()
    assert gateway.completions.running == 1
    gone.set()
    await calling
    await settle()
    (request,) = gateway.responder.requests
    assert gateway.responder.cancels == ([] if own else [request.request_id])
    assert gateway.responder.leavings == (["r5"] if own else [])
    assert (gateway.completions.running, gateway.completions.served) == (0, 1)


async def test_a_slow_reader_gets_the_same_text_in_fewer_events(gateway: Gateway) -> None:
    parts = deltas(words=["w"] * 400)
    gateway.responder.script = lambda request: [parts[0]]
    release = asyncio.Event()
    body = msgspec.json.encode({"model": MODEL, "prompt": "x", "stream": True})
    calling = asyncio.create_task(gateway.call("POST", "/v1/completions", body, {}, slow=release))
    await until(lambda: gateway.responder.requests)
    await settle()
    gateway.responder.send(*parts[1:], final("", parts), None)
    await settle()
    release.set()
    events = (await calling).events
    assert "".join(event["choices"][0]["text"] for event in events) == "w" * 400
    assert len(events) < 100


async def test_the_trace_of_the_caller_is_continued(gateway: Gateway) -> None:
    traceparent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    await gateway.post({"model": MODEL, "prompt": "x"}, traceparent=traceparent)
    assert gateway.responder.headers[0]["traceparent"] == traceparent


async def test_each_tenant_has_its_own_subjects_and_inboxes(gateway: Gateway) -> None:
    body = msgspec.json.encode({"prompt": "x"})
    replies = []
    for tenant in ("alice", "bob", "alice", ""):
        answer = await gateway.call("POST", "/v1/completions", body, {}, tenant=tenant)
        assert answer.status == 200
        replies.append(subjects.owner_of(gateway.responder.reply))
    assert gateway.responder.tenants == replies == ["alice", "bob", "alice", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_ends_has_its_clients_send_their_requests_again(gateway: Gateway, stream: bool) -> None:
    gateway.responder.script = lambda _: []  # it waits in a queue
    calling = asyncio.create_task(gateway.post({"model": MODEL, "prompt": "x", "stream": stream}))
    await until(lambda: bool(gateway.responder.requests))
    await settle()
    gateway.completions.leave()
    answer = await calling
    assert (answer.status, answer.json["error"]["code"]) == (503, "unavailable")
    assert "send the request again" in answer.json["error"]["message"]
    assert not gateway.responder.cancels, "it goes on"


async def test_a_server_that_ends_breaks_off_the_streams_that_have_begun(gateway: Gateway) -> None:
    gateway.responder.script = lambda _: list(deltas()[:2])
    answer = Answer()
    body = msgspec.json.encode({"model": MODEL, "prompt": "x", "stream": True})
    calling = asyncio.create_task(gateway.call("POST", "/v1/completions", body, {}, answer=answer))
    await until(lambda: bool(answer.chunks))
    gateway.completions.leave()
    await calling
    assert b"error" not in b"".join(answer.chunks)
    assert b"[DONE]" not in b"".join(answer.chunks)
    assert not gateway.responder.cancels, "it goes on"
