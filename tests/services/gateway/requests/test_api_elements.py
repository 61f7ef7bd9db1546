"""Every element that an API defines is sent in a request, and treated as the tables say."""

import typing
from typing import Any

import pytest

from pagewire.services.gateway.requests import api_elements
from pagewire.services.gateway.requests.api_elements import Elements, Treatment
from tests.services.gateway.http_client import Answer, Gateway
from tests.support.responder import MODEL

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello!"}]
NAMED = {"name": "look", "parameters": {"type": "object"}, "description": "looks"}
PIECES: dict[str, Any] = {
    "call_id": "c1",
    "id": "i1",
    "name": "look",
    "arguments": "{}",
    "input": "text",
    "output": "done",
    "action": {"type": "exec", "command": ["ls"]},
    "operation": {"type": "delete_file", "path": "a"},
    "content": [{"type": "input_text", "text": "more"}],
    "tools": [{"type": "function", **NAMED}],
}
"""Fields that are enough for an item of any type."""


async def responses(gateway: Gateway, **fields: Any) -> Answer:
    return await gateway.post({"model": MODEL, "input": "Hello!", **fields}, "/v1/responses")


async def messages(gateway: Gateway, **fields: Any) -> Answer:
    return await gateway.post({"model": MODEL, "max_tokens": 9, "messages": HELLO, **fields}, "/v1/messages")


async def chat(gateway: Gateway, **fields: Any) -> Answer:
    return await gateway.post({"model": MODEL, "messages": HELLO, **fields}, "/v1/chat/completions")


def expect(answer: Answer, name: str, treatment: Treatment) -> None:
    """Asserts that an answer to a request with an element is what its treatment promises."""
    assert answer.status == (400 if treatment is Treatment.REFUSED else 200), (name, answer.body)
    if treatment is Treatment.LEFT_OUT:
        assert name in answer.headers["pagewire-warning"]
    elif treatment is not Treatment.REFUSED:
        assert "pagewire-warning" not in answer.headers, (name, answer.headers)


def each(elements: Elements) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "treatment"), list(elements.items()))


@each(api_elements.CHAT_FIELDS)
async def test_fields_of_a_chat(gateway: Gateway, name: str, treatment: Treatment) -> None:
    expect(await chat(gateway, **{name: "x"}), name, treatment)


@each(api_elements.RESPONSES_FIELDS)
async def test_fields_of_responses(gateway: Gateway, name: str, treatment: Treatment) -> None:
    expect(await responses(gateway, **{name: "x"}), name, treatment)


@each(api_elements.RESPONSES_TOOLS)
async def test_tools_of_responses(gateway: Gateway, name: str, treatment: Treatment) -> None:
    tool = {"type": name, **NAMED, "tools": [{"type": "function", **NAMED}]}
    expect(await responses(gateway, tools=[tool]), name, treatment)
    (request,) = gateway.responder.requests
    assert bool(request.tools) == (treatment is Treatment.BUILT)


@each(api_elements.RESPONSES_ITEMS)
async def test_items_of_responses(gateway: Gateway, name: str, treatment: Treatment) -> None:
    item = {**PIECES, "type": name, **({"role": "user"} if name == "message" else {})}
    expect(await responses(gateway, input=[*HELLO, item]), name, treatment)


@each(api_elements.RESPONSES_PARTS)
async def test_parts_of_responses(gateway: Gateway, name: str, treatment: Treatment) -> None:
    part = {"type": name, "text": "a", "refusal": "a"}
    expect(await responses(gateway, input=[{"role": "user", "content": [part]}]), name, treatment)
    output = {"type": "function_call_output", "call_id": "c1", "output": [part]}
    assert (await responses(gateway, input=[*HELLO, output])).status == 200, "a refusal would end the session"


@each(api_elements.MESSAGES_FIELDS)
async def test_fields_of_messages(gateway: Gateway, name: str, treatment: Treatment) -> None:
    expect(await messages(gateway, **{name: [{"x": 1}]}), name, treatment)


@each(api_elements.MESSAGES_TOOLS)
async def test_tools_of_messages(gateway: Gateway, name: str, treatment: Treatment) -> None:
    versioned = name if name == "custom" else f"{name}_20250124"
    tool = {"type": versioned, "name": name, **({"input_schema": {"type": "object"}} if name == "custom" else {})}
    expect(await messages(gateway, tools=[tool]), versioned, treatment)
    (request,) = gateway.responder.requests
    assert bool(request.tools) == (treatment is Treatment.BUILT)


@each(api_elements.MESSAGES_BLOCKS)
async def test_blocks_of_messages(gateway: Gateway, name: str, treatment: Treatment) -> None:
    block = {
        "type": name,
        "text": "a",
        "thinking": "a",
        "id": "t1",
        "tool_use_id": "t1",
        "name": "look",
        "input": {},
        "source": {"type": "text", "data": "a"},
        "content": [{"type": "text", "text": "a"}],
    }
    turns = [*HELLO, {"role": "assistant", "content": [block, {"type": "text", "text": "b"}]}, *HELLO]
    expect(await messages(gateway, messages=turns), name, treatment)
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    answer = await messages(gateway, messages=[*HELLO, {"role": "user", "content": [result]}])
    assert answer.status == 200, "a refusal would end the session"


@each(api_elements.OLLAMA_FIELDS)
async def test_fields_of_ollamas_routes(gateway: Gateway, name: str, treatment: Treatment) -> None:
    for path, body in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "Hello!"})):
        expect(await gateway.post({"model": MODEL, **body, name: "x"}, path), name, treatment)
        assert (await gateway.post({"model": MODEL, **body, name: ""}, path)).status == 200


@each(api_elements.OLLAMA_OPTIONS)
async def test_options_of_ollamas_routes(gateway: Gateway, name: str, treatment: Treatment) -> None:
    options = {name: "x" if name == "stop" else 1}
    expect(await gateway.post({"messages": HELLO, "options": options}, "/api/chat"), name, treatment)


def types_of(union: Any) -> set[str]:
    """Returns the values of `type` of a union of an SDK's models or typed dictionaries."""
    members = [member for member in typing.get_args(union) if not isinstance(member, str)]
    if typing.get_origin(union) is typing.Annotated:
        members = [typing.get_args(union)[0]]
    if not members:
        if fields := getattr(union, "model_fields", None):
            return _literals(fields["type"].annotation) if "type" in fields else set()
        return _literals(typing.get_type_hints(union).get("type")) if isinstance(union, type) else set()
    return set().union(*(types_of(member) for member in members))


def _literals(hint: Any) -> set[str]:
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return set().union(*map(_literals, typing.get_args(hint)))


def test_the_tables_know_every_type_of_openais_client() -> None:
    from openai.types.responses import ResponseInputItem, Tool
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    assert types_of(ResponseInputItem) <= api_elements.RESPONSES_ITEMS.keys()
    assert types_of(Tool) <= api_elements.RESPONSES_TOOLS.keys()
    from pagewire.services.gateway.requests.responses_request import FIELDS, PASSED

    assert ResponseCreateParamsBase.__annotations__.keys() <= api_elements.RESPONSES_FIELDS.keys() | FIELDS | PASSED


def test_the_tables_know_every_type_of_anthropics_client() -> None:
    from anthropic.types.beta import BetaContentBlockParam, BetaToolUnionParam
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase

    from pagewire.services.gateway.requests.anthropic_blocks import tool_kind
    from pagewire.services.gateway.requests.anthropic_request import FIELDS

    assert types_of(BetaContentBlockParam) <= api_elements.MESSAGES_BLOCKS.keys()
    assert {tool_kind(name) for name in types_of(BetaToolUnionParam)} <= api_elements.MESSAGES_TOOLS.keys()
    assert MessageCreateParamsBase.__annotations__.keys() <= api_elements.MESSAGES_FIELDS.keys() | FIELDS


async def test_an_element_of_tomorrow_is_left_out(gateway: Gateway) -> None:
    answer = await responses(gateway, tools=[{"type": "telepathy"}], input=[*HELLO, {"type": "dream", "text": "x"}])
    assert (answer.status, answer.headers["pagewire-warning"]) == (200, "left out: tool telepathy, item dream")
    assert answer.json["object"] == "response"
