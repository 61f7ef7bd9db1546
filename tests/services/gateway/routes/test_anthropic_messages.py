"""`/v1/messages`, over a pipeline with a script."""

from typing import Any

import msgspec
import pytest

from pagewire.shared.errors import ContextLength, ContextLengths, Overloaded
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


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_beyond_the_context_end_the_message_where_the_context_does(
    gateway: Gateway, *, stream: bool
) -> None:
    usage = Usage(7, len(WORDS))
    frames: list[Any] = [Accepted("r1", "c", "r", 7), *deltas(), Final("r1", [FinalChoice(0, "length")], usage)]
    whole: list[Any] = [Result("r1", [Choice(0, TEXT, [5], "length")], usage)]
    gateway.responder.script = lambda request: frames if stream else whole
    for max_tokens, reason in ((len(WORDS), "max_tokens"), (9000, "model_context_window_exceeded")):
        answer = await ask(gateway, max_tokens=max_tokens, stream=stream)
        ends = [event["delta"] for event in events_of(answer) if event["type"] == "message_delta"] if stream else []
        assert (ends[0] if stream else answer.json)["stop_reason"] == reason
        assert gateway.responder.requests[-1].clamp_max_tokens


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
    events = events_of(await ask(gateway, stream=True, max_tokens=len(WORDS)))
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


async def test_tools_reach_the_pipeline_like_a_chats_tools(gateway: Gateway) -> None:
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


TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
FORCED = {"type": "tool", "name": "weather"}


def named_call(text: str, reason: Any = "stop") -> Result:
    form = ChatFormat(tool_calls="named", tool="weather")
    return Result("r1", [Choice(0, text, [5], reason)], Usage(3, 1), chat_format=form)


async def test_a_strict_tool_reaches_the_pipeline_as_strict(gateway: Gateway) -> None:
    await ask(gateway, tools=[{**TOOL, "strict": True}, {**TOOL, "name": "other"}])
    (request,) = gateway.responder.requests
    assert [tool["function"].get("strict") for tool in request.tools or ()] == [True, None]


async def test_a_forced_call_ends_with_tool_use(gateway: Gateway) -> None:
    gateway.responder.script = lambda request: [named_call('{"city": "Bern"}')]
    body = (await ask(gateway, tools=[TOOL], tool_choice=FORCED)).json
    assert (body["stop_reason"], body["content"][0]["input"]) == ("tool_use", {"city": "Bern"})


async def test_a_call_that_no_client_can_make_does_not_end_with_tool_use(gateway: Gateway) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": None}}</tool_call>'
    form = ChatFormat(tool_calls="hermes")
    gateway.responder.script = lambda request: [
        Result("r1", [Choice(0, text, [5], "stop")], Usage(3, 1), chat_format=form)
    ]
    body = (await ask(gateway, tools=[TOOL])).json
    assert (body["stop_reason"], body["content"]) == ("end_turn", [])
    accepted = Accepted("r1", "c", "r", 3, chat_format=form)
    gateway.responder.script = lambda request: [
        accepted,
        *deltas(words=[text]),
        Final("r1", [FinalChoice(0, "stop")], Usage(3, 1)),
        None,
    ]
    assert events_of(await ask(gateway, stream=True, tools=[TOOL]))[-2]["delta"]["stop_reason"] == "end_turn"


async def test_a_call_that_was_cut_is_no_block(gateway: Gateway) -> None:
    gateway.responder.script = lambda request: [named_call('{"city": "Be', "length")]
    body = (await ask(gateway, tools=[TOOL], tool_choice=FORCED, max_tokens=1)).json
    assert (body["stop_reason"], body["content"]) == ("max_tokens", [])


async def test_the_form_of_the_output_is_a_schema(gateway: Gateway) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    assert (await ask(gateway, output_config=config)).status == 200
    assert (await ask(gateway, output_config={})).status == 200
    assert (await ask(gateway, output_format=config["format"])).status == 200
    first, second, third = gateway.responder.requests
    assert first.sampling.structured_outputs is not None
    assert first.sampling.structured_outputs.json == schema
    assert first.chat_template_kwargs == {"reasoning_effort": "high"}
    assert second.sampling.structured_outputs is None
    assert third.sampling.structured_outputs == first.sampling.structured_outputs
    answer = await ask(gateway, output_config={"format": {"type": "xml"}})
    assert (answer.status, "output_config" in answer.json["error"]["message"]) == (400, True)


async def test_the_last_turn_of_the_assistant_is_continued(gateway: Gateway) -> None:
    await ask(gateway, messages=[*HELLO, {"role": "assistant", "content": "The answer is"}])
    (request,) = gateway.responder.requests
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)


async def test_the_billing_header_of_claude_code_is_no_prompt(gateway: Gateway) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.fa6; cc_entrypoint=cli;"}
    await ask(gateway, system=[billing, {"type": "text", "text": "Be brief."}])
    (request,) = gateway.responder.requests
    assert (request.messages or [])[0].content == "Be brief."


async def test_null_fields_count_as_missing(gateway: Gateway) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": None, "is_error": None}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    answer = await ask(gateway, messages=turns, system=None, tools=[{**TOOL, "description": None, "type": None}])
    assert answer.status == 200, answer.body
    (request,) = gateway.responder.requests
    assert (request.messages or [])[2].content == ""


async def test_cached_tokens_are_counted_alike_in_every_event(gateway: Gateway) -> None:
    first, *rest = deltas()
    first.cached_tokens = 2
    gateway.responder.script = lambda request: [
        first,
        *rest,
        Final("r1", [FinalChoice(0, "stop")], Usage(3, 5, cached_tokens=2)),
        None,
    ]
    events = events_of(await ask(gateway, stream=True))
    begin, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert (begin["input_tokens"], begin["cache_read_input_tokens"]) == (1, 2)
    assert (end["input_tokens"], end["cache_read_input_tokens"]) == (1, 2)


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        (ContextLengths(9000, 0, 8192), "prompt is too long: 9000 tokens > 8192 maximum"),
        (ContextLengths(8000, 500, 8192), "input length and `max_tokens` exceed context limit: 8000 + 500 > 8192"),
    ],
)
async def test_a_context_that_is_too_long_has_anthropics_message(
    gateway: Gateway, lengths: ContextLengths, sentence: str
) -> None:
    gateway.responder.script = lambda request: [ContextLength("too long", lengths=lengths), None]
    answer = await ask(gateway)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json["error"]["message"].startswith(sentence)
