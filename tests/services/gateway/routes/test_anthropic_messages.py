"""`/v1/messages`, over a pipeline with a script."""

from typing import Any

import msgspec
import pytest

from pagewire.shared.errors import ContextLength, Overloaded
from pagewire.shared.messages.client import Accepted, ChatFormat, Choice, Final, FinalChoice, Result, Usage
from tests.services.gateway.http_client import Answer, Gateway, start_gateway
from tests.support.responder import MODEL, WORDS, deltas

pytestmark = pytest.mark.anyio

TEXT = "".join(WORDS)
HELLO = [{"role": "user", "content": "Hello!"}]


async def ask(gateway: Gateway, path: str = "/v1/messages", **fields: Any) -> Answer:
    return await gateway.post({"model": MODEL, "max_tokens": 9, "messages": HELLO, **fields}, path)


def events_of(answer: Answer) -> list[dict[str, Any]]:
    events = []
    for block in answer.body.decode().split("\n\n"):
        if block:
            name, _, data = block.partition("\n")
            event = msgspec.json.decode(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
    return events


async def test_a_message_has_anthropics_shape(gateway: Gateway) -> None:
    end = Result("r1", [Choice(0, "Hi", [5, 6], "stop", "###")], Usage(7, 2, cached_tokens=4))
    gateway.responder.script = lambda request: [end]
    answer = await ask(gateway, request_id="ignored", stop_sequences=["###"])
    assert answer.headers["pagewire-warning"].endswith("request_id")
    body = answer.json
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "stop_sequence",
        "stop_sequence": "###",
        "usage": {
            "input_tokens": 3,
            "output_tokens": 2,
            "cache_read_input_tokens": 4,
            "cache_creation_input_tokens": 0,
        },
    }


async def test_fields_reach_the_pipeline(gateway: Gateway) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    fields: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": turns,
        "stop_sequences": ["x"],
    }
    await ask(gateway, **fields, temperature=0.5, top_k=3, metadata={"user_id": "me"}, service_tier="auto")
    (request,) = gateway.responder.requests
    assert request.messages is not None
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "user"]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.stop) == (9, 0.5, 3, ["x"])
    assert request.user == "me"


async def test_a_stream_is_blocks_that_begin_grow_and_end(gateway: Gateway) -> None:
    events = events_of(await ask(gateway, stream=True))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == TEXT
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert (events[0]["message"]["usage"]["input_tokens"], events[-2]["usage"]["output_tokens"]) == (3, 5)


async def test_an_answer_without_text_has_an_empty_block(gateway: Gateway) -> None:
    end = Final("r1", [FinalChoice(0, "stop")], Usage(3, 0))
    gateway.responder.script = lambda request: [end, None]
    kinds = [event["type"] for event in events_of(await ask(gateway, stream=True))]
    assert kinds[1:3] == ["content_block_start", "content_block_stop"]


async def test_tokens_are_counted_without_generating(gateway: Gateway) -> None:
    tool = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    body = {"model": MODEL, "messages": HELLO, "system": "Be brief.", "tools": [tool], "thinking": {"type": "disabled"}}
    answer = await gateway.post(body | {"unknown": 1}, "/v1/messages/count_tokens")
    assert (answer.status, answer.json) == (200, {"input_tokens": 3})
    assert answer.headers["pagewire-warning"].endswith("unknown")
    assert gateway.responder.requests == []
    (conversation,) = gateway.responder.tokenizations
    assert [message.role for message in conversation.messages or ()] == ["system", "user"]
    assert conversation.tools == [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "description": "Looks."}}
    ]
    assert conversation.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_every_error_of_these_paths_has_anthropics_shape(gateway: Gateway, path: str) -> None:
    for answer in (
        await gateway.post(b"{", path),
        await gateway.post({"messages": HELLO, "max_tokens": 1, "model": "other"}, path),
        await gateway.get(path),
        await (await start_gateway(api_key="secret")).post({}, path),
    ):
        assert answer.json.keys() == {"type", "error"}, answer.body
        assert answer.json["error"].keys() == {"type", "message"}
        assert answer.status in {400, 401, 404, 405}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": "hi"}, "messages"),
    ],
)
async def test_errors_have_anthropics_shape(gateway: Gateway, fields: dict[str, Any], part: str) -> None:
    answer = await ask(gateway, **fields)
    assert (answer.status, answer.json["type"]) == (400, "error")
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert part in answer.json["error"]["message"]


async def test_errors_of_the_pipeline_have_anthropics_kinds(gateway: Gateway) -> None:
    gateway.responder.script = lambda request: [Overloaded("busy", 3000), None]
    answer = await ask(gateway)
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
    assert answer.json["error"] == {"type": "rate_limit_error", "message": "busy"}
    gateway.responder.script = lambda request: [*deltas()[:2], ContextLength("long"), None]
    *_, last = events_of(await ask(gateway, stream=True))
    assert last == {"type": "error", "error": {"type": "invalid_request_error", "message": "long"}}


TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


async def test_tools_reach_the_pipeline_as_those_of_a_chat(gateway: Gateway) -> None:
    form = ChatFormat(tool_calls="hermes")
    turns = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
    ]
    end = Result("r1", [Choice(0, CALL, [5], "stop")], Usage(3, 1), chat_format=form)
    gateway.responder.script = lambda request: [end]
    body = (await ask(gateway, messages=turns, tools=[TOOL], tool_choice={"type": "any"})).json
    (call,) = body["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Bern"})
    assert body["stop_reason"] == "tool_use"
    (request,) = gateway.responder.requests
    assert [message.role for message in request.messages or ()] == ["user", "assistant", "tool"]
    assert (request.tool_choice, (request.tools or [{}])[0]["function"]["name"]) == ("required", "weather")


async def test_a_call_in_a_stream_is_a_block_of_json(gateway: Gateway) -> None:
    accepted = Accepted("r1", "c", "r", 3, chat_format=ChatFormat(tool_calls="hermes"))
    gateway.responder.script = lambda request: [
        accepted,
        *deltas(words=["Let me see.", CALL[:30], CALL[30:]]),
        Final("r1", [FinalChoice(0, "stop")], Usage(3, 3)),
        None,
    ]
    events = events_of(await ask(gateway, stream=True, tools=[TOOL]))
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(block["type"], block.get("name")) for block in begun] == [("text", None), ("tool_use", "weather")]
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 1]
    assert msgspec.json.decode("".join(delta["partial_json"] for delta in pieces)) == {"city": "Bern"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
