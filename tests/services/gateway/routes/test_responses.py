"""Tools in `/v1/responses`; the rest is tried with OpenAI's own client in test_service.py."""

from typing import Any

import msgspec
import pytest

from pagewire.shared.messages.client import Accepted, ChatFormat, Choice, Final, FinalChoice, Result, Usage
from tests.services.gateway.http_client import Answer, Gateway
from tests.support.responder import MODEL, deltas

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
FORM = ChatFormat(tool_calls="hermes")


async def ask(gateway: Gateway, **fields: Any) -> Answer:
    return await gateway.post({"model": MODEL, "input": "Weather?", "tools": [TOOL], **fields}, "/v1/responses")


async def test_a_call_is_an_item_of_the_output(gateway: Gateway) -> None:
    end = Result("r1", [Choice(0, CALL, [5], "stop")], Usage(3, 1), chat_format=FORM)
    gateway.responder.script = lambda request: [end]
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    body = (await ask(gateway, input=turns, tool_choice={"type": "function", "name": "weather"})).json
    (call,) = body["output"]
    assert (call["type"], call["name"], msgspec.json.decode(call["arguments"])) == (
        "function_call",
        "weather",
        {"city": "Bern"},
    )
    assert (body["status"], body["tools"]) == ("completed", [{**TOOL, "strict": None}])
    (request,) = gateway.responder.requests
    assert [message.role for message in request.messages or ()] == ["user", "assistant", "tool"]


async def test_a_call_in_a_stream_has_events_of_its_own(gateway: Gateway) -> None:
    gateway.responder.script = lambda request: [
        Accepted("r1", "c", "r", 3, chat_format=FORM),
        *deltas(words=["Let me see.", CALL[:30], CALL[30:]]),
        Final("r1", [FinalChoice(0, "stop")], Usage(3, 3)),
        None,
    ]
    blocks = (await ask(gateway, stream=True)).body.decode().split("\n\n")[:-1]
    events = [msgspec.json.decode(block.partition("data: ")[2]) for block in blocks]
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert (done["name"], done["output_index"]) == ("weather", 1)
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == done["arguments"]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call"]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": 5}, "input"),
    ],
)
async def test_an_unsupported_request_is_refused_by_name(gateway: Gateway, fields: dict[str, Any], part: str) -> None:
    answer = await ask(gateway, **fields)
    assert (answer.status, part in answer.json["error"]["message"]) == (400, True)


NAMESPACE = {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read"}]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "patch"},
}


def called(name: str, arguments: str, reason: Any = "stop", completion: int = 1) -> Result:
    text = f'[{{"name": "{name}", "parameters": {arguments}'
    form = ChatFormat(tool_calls="required")
    return Result("r1", [Choice(0, text, [5], reason)], Usage(3, completion), chat_format=form)


async def test_a_function_of_a_namespace_keeps_its_two_names(gateway: Gateway) -> None:
    gateway.responder.script = lambda request: [called("mcp__files__read", '{"path": "a"}}]')]
    earlier = {"type": "function_call", "call_id": "c0", "namespace": "mcp__files__", "name": "read", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c0", "output": None}
    turns = [{"role": "user", "content": "Read!"}, earlier, result]
    body = (await ask(gateway, tools=[NAMESPACE, {"type": "web_search"}], input=turns)).json
    (call,) = body["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__files__", "read")
    (request,) = gateway.responder.requests
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["mcp__files__read"]
    assert (request.messages or [])[1].tool_calls[0]["function"]["name"] == "mcp__files__read"  # type: ignore[index]


async def test_a_custom_tool_is_called_with_a_free_text(gateway: Gateway) -> None:
    gateway.responder.script = lambda request: [called("apply_patch", '{"input": "*** Begin\\n"}}]')]
    earlier = {"type": "custom_tool_call", "call_id": "c0", "name": "apply_patch", "input": "old"}
    result = {"type": "custom_tool_call_output", "call_id": "c0", "output": "fine"}
    body = (await ask(gateway, tools=[PATCH], input=[{"role": "user", "content": "Patch!"}, earlier, result])).json
    (call,) = body["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n")
    (request,) = gateway.responder.requests
    assert "patch" in (request.tools or [])[0]["function"]["description"]
    assert (request.messages or [])[1].tool_calls[0]["function"]["arguments"] == '{"input":"old"}'  # type: ignore[index]


async def test_the_text_of_a_custom_tool_is_streamed_whole(gateway: Gateway) -> None:
    text = '[{"name": "apply_patch", "parameters": {"input": "*** Begin"}}]'
    gateway.responder.script = lambda request: [
        Accepted("r1", "c", "r", 3, chat_format=ChatFormat(tool_calls="required")),
        *deltas(words=[text[:50], text[50:]]),
        Final("r1", [FinalChoice(0, "stop")], Usage(3, 2)),
        None,
    ]
    blocks = (await ask(gateway, stream=True, tools=[PATCH])).body.decode().split("\n\n")[:-1]
    events = [msgspec.json.decode(block.partition("data: ")[2]) for block in blocks]
    kinds = [event["type"] for event in events if "custom" in event["type"]]
    assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin")


async def test_allowed_tools_are_the_only_ones(gateway: Gateway) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]}
    await ask(gateway, tools=[TOOL, NAMESPACE], tool_choice=allowed)
    (request,) = gateway.responder.requests
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["mcp__files__read"]
    assert request.tool_choice == "required"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_cut_item_is_incomplete_wherever_it_is_shown(gateway: Gateway, *, streamed: bool) -> None:
    if streamed:
        gateway.responder.script = lambda request: [
            Accepted("r1", "c", "r", 3),
            *deltas(words=["Once"]),
            Final("r1", [FinalChoice(0, "length")], Usage(3, 1)),
            None,
        ]
        blocks = (await ask(gateway, stream=True, tools=None)).body.decode().split("\n\n")[:-1]
        events = [msgspec.json.decode(block.partition("data: ")[2]) for block in blocks]
        (item,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert item["status"] == "incomplete"
        response = events[-1]["response"]
    else:
        gateway.responder.script = lambda request: [Result("r1", [Choice(0, "Once", [5], "length")], Usage(3, 1))]
        response = (await ask(gateway, tools=None)).json
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")


async def test_reasoning_of_an_earlier_answer_belongs_to_its_turn(gateway: Gateway) -> None:
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    await ask(gateway, input=[{"role": "user", "content": "Sun?"}, reasoning, text, call])
    (request,) = gateway.responder.requests
    _, answer = request.messages or []
    assert (answer.reasoning_content, bool(answer.tool_calls)) == ("Hm.", True)


@pytest.mark.parametrize("effort", ["none", "high"])
async def test_the_effort_of_reasoning_reaches_the_template(gateway: Gateway, effort: str) -> None:
    answer = await ask(gateway, reasoning={"effort": effort, "summary": "auto"}, text={"verbosity": "low"})
    assert answer.status == 200, answer.body
    (request,) = gateway.responder.requests
    variables = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": "high"}
    assert request.chat_template_kwargs == variables


async def test_reasoning_tokens_are_counted(gateway: Gateway) -> None:
    end = Result("r1", [Choice(0, "Hi", [5], "stop")], Usage(3, 9, reasoning_tokens=7))
    gateway.responder.script = lambda request: [end]
    usage = (await ask(gateway, tools=None)).json["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 7}
