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
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": 5}, "input"),
    ],
)
async def test_an_unsupported_request_is_refused_by_name(gateway: Gateway, fields: dict[str, Any], part: str) -> None:
    answer = await ask(gateway, **fields)
    assert (answer.status, part in answer.json["error"]["message"]) == (400, True)
