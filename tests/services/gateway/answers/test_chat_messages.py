"""Reasoning and tool calls in `/v1/chat/completions`, over a pipeline with a script."""

from typing import Any

import pytest

from pagewire.shared.errors import RequestError
from pagewire.shared.messages.client import (
    ChatFormat,
    Choice,
    Delta,
    Final,
    FinalChoice,
    Frame,
    FunctionName,
    GenerateRequest,
    Logprob,
    Result,
    ToolChoice,
    Usage,
)
from tests.services.gateway.http_client import Gateway
from tests.support.responder import MODEL

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello!"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORM = ChatFormat("hermes", "think")
PIECES = [
    *["<think>", "\n", "Hm", ".\n", "</think>", "\n\n", "I look.", "\n", "<tool_call>", '\n{"name": "f",'],
    *[' "arguments": {"a"', ": 1", "}}\n</tool", "_call>", '<tool_call>{"name": "g"}</tool_call>'],
]


def answering(gateway: Gateway, pieces: list[str], form: ChatFormat | None = FORM, reason: str = "stop") -> None:
    """Has requests answered with a text in pieces, each with a log-probability if the request has `logprobs`."""
    gateway.responder.chat_format = form

    def script(request: GenerateRequest) -> list[Frame | RequestError | None]:
        with_logprobs = request.sampling.logprobs is not None
        logprobs = [{7: Logprob(-0.5, 1, piece)} for piece in pieces]
        name, end, usage = request.request_id or "", FinalChoice(0, reason), Usage(3, len(pieces))  # type: ignore[arg-type]
        if not request.stream:
            text, ids = "".join(pieces), [7] * len(pieces)
            choice = Choice(0, text, ids, reason, logprobs=logprobs if with_logprobs else None)  # type: ignore[arg-type]
            return [Result(name, [choice], usage, chat_format=form)]
        deltas = [
            Delta(0, start, piece, [7], [logprobs[start]] if with_logprobs else None)
            for start, piece in enumerate(pieces)
        ]
        return [*deltas, Final(name, [end], usage), None]

    gateway.responder.script = script


async def whole(gateway: Gateway, **fields: Any) -> Any:
    answer = await gateway.post({"model": MODEL, "messages": HELLO, "tools": [TOOL], **fields}, CHAT)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


async def streamed(gateway: Gateway, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """Returns the message that the events of a stream add up to, and their choices."""
    body = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "stream": True, **fields}
    choices = [event["choices"][0] for event in (await gateway.post(body, CHAT)).events if event["choices"]]
    message: dict[str, Any] = {"tool_calls": []}
    for choice in choices:
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            (part,) = value
            if "id" in part:
                message["tool_calls"].append({**part, "function": dict(part["function"])})
            else:
                message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    for call in message["tool_calls"]:
        del call["index"]
    return message, choices


async def test_a_message_has_content_reasoning_and_calls(gateway: Gateway) -> None:
    answering(gateway, PIECES)
    choice = await whole(gateway, request_id="r1")
    message = choice["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I look.")
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert [(call["type"], call["function"]) for call in message["tool_calls"]] == [
        ("function", {"arguments": '{"a": 1}', "name": "f"}),
        ("function", {"arguments": "{}", "name": "g"}),
    ]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)
    assert (await whole(gateway, request_id="r1"))["message"] == message
    request = gateway.responder.requests[0]
    assert (request.tools, request.tool_choice, request.parallel_tool_calls) == ([TOOL], None, True)


async def test_a_stream_adds_up_to_the_same_message(gateway: Gateway) -> None:
    answering(gateway, PIECES)
    expected = (await whole(gateway, request_id="r1"))["message"]
    message, choices = await streamed(gateway, request_id="r1")
    assert message == {name: value for name, value in expected.items() if name != "refusal"}
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    arguments = [
        choice["delta"]["tool_calls"][0]["function"]["arguments"]
        for choice in choices
        if "tool_calls" in choice["delta"]
    ]
    assert arguments == ["", '{"a"', ": 1", "}", "", "{}"]


async def test_reasoning_can_be_left_out(gateway: Gateway) -> None:
    answering(gateway, PIECES)
    choice = await whole(gateway, include_reasoning=False)
    assert choice["message"]["content"] == "I look."
    assert "reasoning" not in choice["message"]
    message, _ = await streamed(gateway, include_reasoning=False)
    assert message.keys() == {"role", "content", "tool_calls"}


async def test_log_probabilities_of_every_token_are_in_the_stream(gateway: Gateway) -> None:
    answering(gateway, PIECES)
    choice = await whole(gateway, logprobs=True)
    assert [each["token"] for each in choice["logprobs"]["content"]] == PIECES
    _, choices = await streamed(gateway, logprobs=True)
    tokens = [each["token"] for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    assert tokens == PIECES


async def test_every_event_of_a_parsed_chat_may_have_the_usage(gateway: Gateway) -> None:
    answering(gateway, PIECES)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "stream": True, "stream_options": options}
    *events, last = (await gateway.post(body, CHAT)).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[-1], last["usage"]["completion_tokens"], last["choices"]) == (len(PIECES), len(PIECES), [])


@pytest.mark.parametrize(
    ("pieces", "form", "reason", "expected"),
    [
        (["Hi", "."], ChatFormat("hermes"), "stop", "stop"),
        (["<tool_call>", '{"name": "f", "arguments": {"a'], ChatFormat("hermes"), "length", "length"),
        (['{"a"', ": 1}"], ChatFormat("named", tool="f"), "stop", "stop"),
        (['[{"name": "f", ', '"parameters": {"a": 1}}]'], ChatFormat("required"), "stop", "tool_calls"),
    ],
)
async def test_a_message_and_its_stream_end_for_the_same_reason(
    gateway: Gateway, pieces: list[str], form: ChatFormat, reason: str, expected: str
) -> None:
    answering(gateway, pieces, form, reason)
    choice = await whole(gateway, request_id="r1")
    assert choice["finish_reason"] == expected
    message, choices = await streamed(gateway, request_id="r1")
    assert choices[-1]["finish_reason"] == expected
    assert message["tool_calls"] == choice["message"].get("tool_calls", [])
    assert message["content"] == (choice["message"]["content"] or "")


async def test_ids_of_calls_have_the_form_that_the_models_template_takes(gateway: Gateway) -> None:
    answering(gateway, ['[{"name": "f", "parameters": {}}]'], ChatFormat("required", short_ids=True))
    (call,) = (await whole(gateway))["message"]["tool_calls"]
    assert (len(call["id"]), call["id"].isalnum()) == (9, True)


async def test_a_choice_of_tools_reaches_the_pipeline(gateway: Gateway) -> None:
    answering(gateway, ["Hi"], None)
    function = {"type": "function", "function": {"name": "f"}}
    for choice in ("none", "auto", "required", function):
        await whole(gateway, tool_choice=choice, parallel_tool_calls=False)
    choices = [request.tool_choice for request in gateway.responder.requests]
    assert choices == ["none", "auto", "required", ToolChoice(FunctionName("f"))]
    assert not any(request.parallel_tool_calls for request in gateway.responder.requests)
