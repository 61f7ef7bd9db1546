"""Tools with a model whose chat template shows none: over every API, in every choice, with calls in the history."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import pytest

from pagewire import SamplingParams, StructuredOutputsParams
from pagewire.services.gateway import app
from pagewire.services.gateway.metrics.metrics_page import MetricsPage
from pagewire.services.gateway.routes.endpoint import Endpoint
from pagewire.services.gateway.routes.health import Health
from pagewire.services.gateway.service import APIS
from pagewire.shared.settings.config import Settings
from tests.support.pipeline import Pipeline, running

pytestmark = pytest.mark.anyio

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "day": {"enum": [1, 2]}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "get_weather", "description": "The weather of a day", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city": "Paris", "day": 1}'
CALLED = f'Wait.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
"""An answer with a call."""
SAYS_IT: Any = {"structured_outputs": {"choice": [CALLED]}}
QUESTION: Any = {"role": "user", "content": "Weather?"}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
HISTORY: Any = [
    {"role": "system", "content": "Be brief."},
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sun."},
    {"role": "user", "content": "And tomorrow?"},
]
Post = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
async def pipeline() -> AsyncIterator[Pipeline]:
    settings = Settings(model="bundled", served_model_name="m", max_model_len=1024, log_level="error")
    async with running(settings) as pipeline:
        yield pipeline


@pytest.fixture
async def post(pipeline: Pipeline) -> AsyncIterator[Post]:
    """Posts a body to a path of a gateway: the answer, or the events of a stream."""
    endpoints = {path: Endpoint(api, pipeline.client, body_limit=100_000) for path, api in APIS.items()}
    health = Health(pipeline.bus, lambda: None)
    gateway = app.build(pipeline.client, endpoints, health, MetricsPage(pipeline.bus, vllm=False))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(gateway), base_url="http://pagewire") as http:

        async def send(path: str, **body: Any) -> Any:
            answer = await http.post(path, json={"model": "m", **body})
            assert answer.status_code == 200, answer.text
            if body.get("stream"):
                lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
                return [json.loads(line) for line in lines if line != "[DONE]"]
            return answer.json()

        yield send


def is_valid(arguments: str) -> bool:
    values = json.loads(arguments)
    return set(values) == {"city", "day"} and values["city"] in {"Paris", "Rome"} and values["day"] in {1, 2}


async def test_a_chat_calls_tools_freely_and_on_demand(post: Post) -> None:
    async def chat(**body: Any) -> Any:
        options = {"messages": [QUESTION], "tools": [TOOL], "max_tokens": 400, "seed": 1, **body}
        return (await post("/v1/chat/completions", **options))["choices"][0]

    free = await chat(**SAYS_IT)
    assert (free["message"]["content"], free["finish_reason"]) == ("Wait.", "tool_calls")
    assert free["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    required = await chat(tool_choice="required", parallel_tool_calls=False)
    assert is_valid(required["message"]["tool_calls"][0]["function"]["arguments"])
    named = await chat(tool_choice=NAMED)
    assert is_valid(named["message"]["tool_calls"][0]["function"]["arguments"])
    none = await chat(tool_choice="none", **SAYS_IT)
    assert none["message"]["content"] == CALLED
    assert (await chat(max_tokens=4))["finish_reason"] in {"length", "stop"}


async def test_a_stream_has_the_call_apart_from_the_text(post: Post) -> None:
    events = await post("/v1/chat/completions", messages=[QUESTION], tools=[TOOL], stream=True, **SAYS_IT)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Wait."
    calls = [part for delta in deltas for part in delta.get("tool_calls") or ()]
    assert "".join(part["function"].get("arguments") or "" for part in calls) == ARGUMENTS


async def test_calls_and_results_of_the_history_are_in_the_prompt(pipeline: Pipeline, post: Post) -> None:
    answer = await pipeline.client.generate(
        messages=HISTORY,
        tools=[TOOL],
        sampling=SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(choice=["Rain."])),
        return_token_ids=True,
    )
    (ids,) = answer.prompt_token_ids or []
    prompt = await pipeline.client.detokenize(ids)
    for text in ("Be brief.", json.dumps(FUNCTION), ARGUMENTS, "<tool_response>\nSun.", "And tomorrow?"):
        assert text in prompt
    for body in ({"messages": HISTORY}, {"messages": HISTORY[1:4]}, {"messages": HISTORY, "tool_choice": "none"}):
        assert (await post("/v1/chat/completions", tools=[TOOL], max_tokens=2, **body))["choices"]


async def test_responses_continue_after_a_tools_result(post: Post) -> None:
    tools = [{"type": "function", **FUNCTION}]
    answer = await post("/v1/responses", input="Weather?", tools=tools, tool_choice="required", max_output_tokens=400)
    call = next(item for item in answer["output"] if item["type"] == "function_call")
    assert is_valid(call["arguments"])
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sun."}
    turns = [QUESTION, call, output]
    assert (await post("/v1/responses", input=turns, tools=tools, max_output_tokens=2))["output"]
    events = await post("/v1/responses", input=turns, tools=tools, max_output_tokens=2, stream=True)
    assert events[-1]["type"] in {"response.completed", "response.incomplete"}


async def test_messages_continue_after_a_tools_result(post: Post) -> None:
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    choice = {"type": "tool", "name": "get_weather"}
    answer = await post("/v1/messages", messages=[QUESTION], tools=tools, tool_choice=choice, max_tokens=400)
    use = next(block for block in answer["content"] if block["type"] == "tool_use")
    assert is_valid(json.dumps(use["input"]))
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "Sun."}
    turns = [
        QUESTION,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And tomorrow?"}]},
    ]
    assert (await post("/v1/messages", messages=turns, tools=tools, max_tokens=2))["content"]
    events = await post("/v1/messages", messages=turns, tools=tools, max_tokens=2, stream=True)
    assert events[-1]["type"] == "message_stop"
