"""Tools and reasoning through all services, with the official `openai` package in front.

The model has random weights: grammars make it write what a real one would.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from pagewire import SamplingParams, StructuredOutputsParams, read_message
from pagewire.services.gateway import app
from pagewire.services.gateway.metrics.metrics_page import MetricsPage
from pagewire.services.gateway.routes.endpoint import Endpoint
from pagewire.services.gateway.routes.health import Health
from pagewire.services.gateway.service import APIS
from pagewire.shared.chat.formats import REASONING
from pagewire.shared.chat.parser import Call, Message, MessageParser
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import Pipeline, running

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{% if tools %}Call as in <tool_call>arguments</tool_call>:"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    "{% endfor %}"
    "<assistant>{% if thinks %}<think>{% elif thinks is defined %}<think></think>{% endif %}"
)
QUESTION: Any = [{"role": "user", "content": "Weather?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "day": {"enum": [1, 2]}},
            "required": ["city", "day"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"additionalProperties": False}}}
ARGUMENTS = '{"city":  "Paris", "note": "é🦙 }"}'
TEXT = f"""<think>
I look.
</think>

Wait.
<tool_call>
{{"name": "get_weather", "arguments": {ARGUMENTS}}}
</tool_call>"""
SPOKEN = Message("Wait.", "I look.", [Call("get_weather", ARGUMENTS)])
QUIET: Any = {"chat_template_kwargs": {"thinks": False}}
"""The prompt ends behind the reasoning: a grammar then begins with the first token."""
SAYING: Any = {"structured_outputs": {"choice": [TEXT]}, **QUIET}
OPTIONS: Any = {"model": "llama", "messages": QUESTION, "tools": [TOOL, TIME], "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
async def pipeline() -> AsyncIterator[Pipeline]:
    settings = Settings(
        model=str(checkpoint("llama")),
        served_model_name="llama",
        dtype="float32",
        log_level="error",
        chat_template=TEMPLATE,
    )
    async with running(settings) as pipeline:
        yield pipeline


@pytest.fixture
async def chat(pipeline: Pipeline) -> AsyncIterator[Any]:
    """OpenAI's own client, at the chat completions of a gateway."""
    endpoints = {path: Endpoint(api, pipeline.client, body_limit=100_000) for path, api in APIS.items()}
    gateway = app.build(
        pipeline.client, endpoints, Health(pipeline.bus, lambda: None), MetricsPage(pipeline.bus, vllm=False)
    )
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(gateway)) as http:
        client = openai.AsyncOpenAI(base_url="http://pagewire/v1", api_key="none", max_retries=0, http_client=http)
        yield client.chat.completions


def check(arguments: str) -> bool:
    """Whether the arguments are what the schema of the tool allows."""
    values = json.loads(arguments)
    return set(values) == {"city", "day"} and values["city"] in {"Paris", "Rome"} and values["day"] in {1, 2}


async def test_http_answers_have_reasoning_and_calls_apart_from_the_text(chat: Any) -> None:
    answer = await chat.create(**OPTIONS, extra_body=SAYING)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
    assert (choice.message.reasoning, choice.message.reasoning_content) == ("I look.", "I look.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)

    # With log-probabilities every token is sampled: none comes with another one.
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": SAYING, "logprobs": True}
    *chunks, last = [chunk async for chunk in await chat.create(**OPTIONS, **options)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Wait."
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "I look."
    calls = [part for delta in deltas for part in delta.tool_calls or ()]
    assert (calls[0].function.name, calls[0].id.startswith("call_")) == ("get_weather", True)
    assert "".join(part.function.arguments for part in calls) == ARGUMENTS
    assert len(calls) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert last.usage.completion_tokens == answer.usage.completion_tokens

    # The whole conversation goes back, with what the tool has said.
    turns = [*QUESTION, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sun."}]
    more = await chat.create(
        **OPTIONS | {"messages": turns},
        tool_choice="none",
        extra_body=SAYING | {"structured_outputs": {"choice": ["Sun."]}},
    )
    assert (more.choices[0].finish_reason, more.choices[0].message.content) == ("stop", "Sun.")
    assert more.choices[0].message.tool_calls is None
    assert more.usage.prompt_tokens > answer.usage.prompt_tokens

    # The text is left as it is.
    plain = await chat.create(**OPTIONS, tool_choice="none", extra_body=SAYING)
    assert plain.choices[0].message.content == TEXT.partition("\n\n")[2]


async def test_forced_calls_follow_the_schemas(chat: Any) -> None:
    for seed in range(3):
        options = OPTIONS | {"seed": seed, "extra_body": QUIET}
        answer = await chat.create(**options, tool_choice="required", parallel_tool_calls=False)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        arguments = call.function.arguments
        assert check(arguments) if call.function.name == "get_weather" else json.loads(arguments) == {}

        named = {"type": "function", "function": {"name": "get_weather"}}
        (choice,) = (await chat.create(**options, tool_choice=named)).choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, call.function.name) == ("stop", "get_weather")
        assert check(call.function.arguments)


async def test_nats_clients_read_calls_from_the_text(pipeline: Pipeline) -> None:
    options: Any = {"tools": [TOOL], "temperature": 1.0, "max_tokens": None, **SAYING}
    result = await pipeline.client.chat(QUESTION, **options)
    assert result.choices[0].text == TEXT
    assert read_message(TEXT, result.chat_format) == SPOKEN
    stream = pipeline.client.stream_chat(QUESTION, **options)
    message, parser = Message(), None
    async for delta in stream:
        assert stream.chat_format is not None
        parser = parser or MessageParser(stream.chat_format)
        for part in parser.push(delta.text):
            message.add(part)
    assert parser is not None
    for part in parser.end():
        message.add(part)
    assert message == SPOKEN


async def test_a_prompt_can_begin_the_reasoning(pipeline: Pipeline) -> None:
    async def opened(**kwargs: bool) -> bool:
        result = await pipeline.client.chat(QUESTION, chat_template_kwargs=kwargs, max_tokens=1)
        assert result.chat_format is not None
        return result.chat_format.opened

    assert [await opened(), await opened(thinks=True), await opened(thinks=False)] == [False, True, False]


async def test_a_tool_that_cannot_be_called_is_refused(chat: Any, pipeline: Pipeline) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    with pytest.raises(openai.BadRequestError, match="tool_choice names get_time"):
        await chat.create(model="llama", messages=QUESTION, tools=[TOOL], tool_choice=named, stream=True)
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError, match="cannot be compiled"):
        await chat.create(model="llama", messages=QUESTION, tools=[bad], tool_choice="required")
    with pytest.raises(InvalidRequest, match="tools need messages"):
        await pipeline.client.generate("x", tools=[TOOL])


async def test_a_grammar_begins_behind_the_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tags are letters, which a model with random weights writes in a while."""
    monkeypatch.setitem(REASONING, "think", ("Q", "Z"))
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinks %}Q{% elif thinks is defined %}QZ{% endif %}"
    )
    settings = Settings(model=str(checkpoint("llama")), dtype="float32", log_level="error", chat_template=template)
    form = StructuredOutputsParams(choice=["Sun.", "Rain."])
    answer = r"\s*(Sun\.|Rain\.)"
    async with running(settings) as pipeline:
        letters = {(await pipeline.client.tokenize(letter))[0]: 7.0 for letter in "QZ"}

        async def texts(**kwargs: bool) -> set[str]:
            sampling = SamplingParams(
                n=6, seed=1, max_tokens=200, temperature=1.0, structured_outputs=form, logit_bias=letters
            )
            result = await pipeline.client.chat(QUESTION, sampling, chat_template_kwargs=kwargs)
            for choice in result.choices:
                message = read_message(choice.text, result.chat_format)
                assert message.content in {"Sun.", "Rain."}, choice.text
                assert (message.reasoning or "") == choice.text.rpartition("Z")[0].removeprefix("Q").strip(" \t\r\n")
            return {choice.text for choice in result.choices}

        free, begun, over = await asyncio.gather(texts(), texts(thinks=True), texts(thinks=False))
    assert all(re.fullmatch(f"(Q[^Z]*Z)?{answer}", text) for text in free)
    assert any(text.startswith("Q") for text in free)
    assert all(re.fullmatch(f"[^Z]*Z{answer}", text) for text in begun)
    assert over <= {"Sun.", "Rain."}
