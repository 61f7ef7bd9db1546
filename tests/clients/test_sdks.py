"""The official packages `openai` and `anthropic`, unchanged, against one stack with the bundled model.

Every answer to `openai` is what OpenAI's own description says. The model is small: grammars make it write what a large
one would.
"""

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import anthropic
import httpx2
import openai
import pydantic
import pytest

from pagewire.shared.settings.config import Settings
from tests.support.openai_description import CheckedTransport
from tests.support.stack_thread import stack_url
from tests.support.waiting import PATIENCE

KEY, MODEL, PROMPT = "secret", "bundled", "Once upon a time"
CONTEXT, LONG = 512, 300
"""Tokens; a small model writes much white space where a grammar allows it."""
TEMPLATE = (
    "{% if tools %}Call as in <tool_call>arguments</tool_call>:"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}\n{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    "\nassistant:{% if enable_thinking %}<think>{% elif enable_thinking is defined %}<think></think>{% endif %}"
)
HELLO: Any = [{"role": "user", "content": "Tell me a story."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "day": {"enum": [1, 2]}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
FLAT_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "day": 1}}\n</tool_call>'
ANTHROPICS_TOOL: Any = {"name": "get_weather", "input_schema": PARAMETERS}


def saying(text: str) -> dict[str, Any]:
    """Fields that make the model write a text."""
    return {"structured_outputs": {"choice": [text]}}


AT_ONCE: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
"""Closes the reasoning in the prompt: a form binds what comes behind it."""


class City(pydantic.BaseModel):
    """The class that an answer is parsed into."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["Paris", "Rome"]
    large: bool


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = Settings(
        model=MODEL,
        port=0,
        nats_port=0,
        api_key=KEY,
        chat_template=TEMPLATE,
        max_model_len=CONTEXT,
        num_kv_blocks=256,
        log_level="error",
    )
    with stack_url(settings) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    transport = CheckedTransport()
    with httpx2.Client(transport=transport, timeout=PATIENCE) as http:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=http)
    assert transport.checked


@pytest.fixture
def sdk(client: openai.OpenAI) -> Any:
    """The routes, with the model and a few tokens filled in."""
    return SimpleNamespace(
        complete=partial(client.completions.create, model=MODEL, prompt=PROMPT, temperature=0, max_tokens=6),
        chat=partial(client.chat.completions.create, model=MODEL, messages=HELLO, temperature=0, max_tokens=6),
        respond=partial(client.responses.create, model=MODEL, input="Hi.", temperature=0, max_output_tokens=6),
    )


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def message(claude: anthropic.Anthropic) -> Any:
    return partial(claude.messages.create, model=MODEL, max_tokens=6, messages=HELLO, extra_body={"temperature": 0})


# Models and completions.


def test_models_are_listed_and_described(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "pagewire"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_and_its_stream_are_equal(sdk: Any) -> None:
    whole = sdk.complete()
    *parts, last = sdk.complete(stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_usage_adds_up(sdk: Any) -> None:
    usage = sdk.complete().usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == 6
    assert usage.prompt_tokens_details.cached_tokens >= 0


@pytest.mark.parametrize("prompt", [[5, 6, 7], [PROMPT], [[5, 6, 7]]])
def test_prompts_may_be_ids_and_lists(sdk: Any, prompt: Any) -> None:
    assert len(sdk.complete(prompt=prompt).choices) == 1


def test_several_prompts_have_several_choices(sdk: Any) -> None:
    whole = sdk.complete(prompt=[PROMPT, "The king"], n=2, temperature=1, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for part in sdk.complete(prompt=[PROMPT, "The king"], n=2, temperature=1, seed=1, stream=True):
        texts[part.choices[0].index] += part.choices[0].text
    assert list(texts.values()) == [choice.text for choice in whole.choices]


def test_a_seed_repeats_a_text(sdk: Any) -> None:
    texts = {sdk.complete(temperature=1, seed=seed).choices[0].text for seed in (3, 3, 3)}
    assert len(texts) == 1
    assert sdk.complete(temperature=1, seed=4).choices[0].text not in texts


def test_an_echo_begins_with_the_prompt(sdk: Any) -> None:
    assert sdk.complete(echo=True).choices[0].text.startswith(PROMPT)
    assert sdk.complete(echo=True, max_tokens=0).choices[0].text == PROMPT


def test_a_completion_has_logprobs(sdk: Any) -> None:
    logprobs = sdk.complete(logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 6
    assert all(len(top) in {2, 3} for top in logprobs.top_logprobs)


def test_a_stop_ends_a_completion(sdk: Any) -> None:
    text = sdk.complete().choices[0].text
    word = text.split()[1]
    stopped = sdk.complete(stop=word).choices[0]
    assert (stopped.finish_reason, word in stopped.text) == ("stop", False)


def test_a_bias_chooses_the_token(sdk: Any) -> None:
    answer = sdk.complete(logit_bias={"77": 100}, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [77] * 6


def test_vllms_fields_go_beside_openais(sdk: Any) -> None:
    extra = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [5]}
    assert sdk.complete(temperature=1, seed=2, extra_body=extra).usage.completion_tokens == 6


def test_best_of_returns_the_best_answer(sdk: Any) -> None:
    assert len(sdk.complete(best_of=3, temperature=1, seed=1).choices) == 1


def test_an_answer_follows_a_regular_expression(sdk: Any) -> None:
    text = sdk.complete(extra_body={"structured_outputs": {"regex": "[0-9]{3}"}}).choices[0].text
    assert text.isdigit()
    assert len(text) == 3


# Chats.


def test_a_chat_and_its_stream_are_equal(sdk: Any) -> None:
    whole = sdk.chat().choices[0]
    parts = list(sdk.chat(stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.message.content
    assert parts[-1].choices[0].finish_reason == whole.finish_reason


def test_a_stream_has_usage_on_request(sdk: Any) -> None:
    *parts, last = sdk.chat(stream=True, stream_options={"include_usage": True})
    assert all(part.usage is None for part in parts)
    assert last.usage.completion_tokens == 6


def test_null_fields_count_as_missing(sdk: Any) -> None:
    assert sdk.chat(stop=None, seed=None, tools=None, extra_body={"top_k": None}).choices


def test_a_chat_has_logprobs(sdk: Any) -> None:
    content = sdk.chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in content] == [2] * 6
    streamed = [token for part in sdk.chat(logprobs=True, stream=True) for token in _logprobs(part)]
    assert [token.token for token in streamed] == [token.token for token in content]


def _logprobs(part: Any) -> list[Any]:
    logprobs = part.choices[0].logprobs
    return [] if logprobs is None else logprobs.content


def test_a_chat_has_several_answers(sdk: Any) -> None:
    assert [choice.index for choice in sdk.chat(n=3, temperature=1, seed=1).choices] == [0, 1, 2]


def test_the_newer_token_limit_wins(sdk: Any) -> None:
    assert sdk.chat(max_completion_tokens=2).usage.completion_tokens == 2


def test_content_may_be_parts_and_roles_all_of_openais(sdk: Any) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story."}]},
    ]
    assert sdk.chat(messages=messages).choices[0].message.role == "assistant"


def test_an_answer_follows_a_schema(sdk: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
    City.model_validate_json(sdk.chat(response_format=form, max_tokens=LONG).choices[0].message.content)


def test_the_sdk_parses_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=City, max_tokens=LONG)
    assert isinstance(answer.choices[0].message.parsed, City)


def test_the_sdks_stream_helper_collects_a_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, max_tokens=LONG, extra_body=saying("Yes.")
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(sdk: Any, choice: Any, stream: bool) -> None:
    answer = sdk.chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=LONG, stream=stream)
    if stream:
        calls = [call for part in answer for call in part.choices[0].delta.tool_calls or ()]
        name, arguments = calls[0].function.name, "".join(call.function.arguments for call in calls)
    else:
        ((call,), name) = (answer.choices[0].message.tool_calls, answer.choices[0].message.tool_calls[0].function.name)
        arguments = call.function.arguments
    assert name == "get_weather"
    assert json.loads(arguments).keys() == {"city", "day"}


def test_a_tool_is_called_where_the_model_chooses_it(sdk: Any) -> None:
    (choice,) = sdk.chat(tools=[TOOL], max_tokens=60, extra_body=saying(CALL) | AT_ONCE).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris", "day": 1}


def test_a_tools_result_is_answered(sdk: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    assert sdk.chat(messages=turns, tools=[TOOL], tool_choice="none").choices[0].message.content


def test_reasoning_has_both_of_its_names(sdk: Any) -> None:
    text = "<think>\nI see.\n</think>\n\nYes."
    answer = sdk.chat(max_tokens=40, extra_body=saying(text)).choices[0].message
    assert (answer.content, answer.reasoning, answer.reasoning_content) == ("Yes.", "I see.", "I see.")


# Responses.


def test_a_response_and_its_stream_are_equal(sdk: Any) -> None:
    whole = sdk.respond(instructions="Be brief.", metadata={"a": "b"}, store=False)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(sdk.respond(instructions="Be brief.", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text


def test_the_sdks_stream_helper_collects_a_response(client: openai.OpenAI) -> None:
    text_format: Any = {"format": {"type": "json_schema", "name": "city", "schema": City.model_json_schema()}}
    with client.responses.stream(model=MODEL, input="Hi.", text=text_format, max_output_tokens=LONG) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.status == "completed"
    City.model_validate_json(final.output_text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_its_function_call(sdk: Any, stream: bool) -> None:
    answer = sdk.respond(
        tools=[FLAT_TOOL], tool_choice="required", parallel_tool_calls=False, max_output_tokens=LONG, stream=stream
    )
    if stream:
        events = list(answer)
        pieces = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        (item,) = events[-1].response.output
        assert pieces == item.arguments
    else:
        (item,) = answer.output
    assert (item.type, item.name, item.status) == ("function_call", "get_weather", "completed")
    assert json.loads(item.arguments).keys() == {"city", "day"}
    turns = [
        {"role": "user", "content": "Hi."},
        {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": item.arguments},
        {"type": "function_call_output", "call_id": item.call_id, "output": "Sunny."},
    ]
    assert sdk.respond(input=turns, tools=[FLAT_TOOL], tool_choice="none").output_text


def test_the_output_of_a_response_is_input_of_the_next(sdk: Any) -> None:
    answer = sdk.respond(input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi."}]}])
    turns = [{"role": "user", "content": "Hi."}, *answer.output, {"role": "user", "content": "More."}]
    assert sdk.respond(input=turns).output_text


def test_a_request_that_needs_stored_answers_is_refused(sdk: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        sdk.respond(previous_response_id="resp_1")


# Errors and time-outs.


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logprobs": 99}, "logprobs"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(sdk: Any, fields: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=param) as caught:
        sdk.complete(stream=stream, **fields)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


def test_an_unknown_model_is_not_found(sdk: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="other") as caught:
        sdk.chat(model="other")
    assert caught.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_is_refused(sdk: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)) as caught:
        sdk.complete(prompt=[5] * CONTEXT)
    assert caught.value.code == "context_length_exceeded"


def test_a_wrong_key_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(model=MODEL, prompt="x")


def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model=MODEL, input="x")


def test_a_time_out_leaves_the_server_well(client: openai.OpenAI, sdk: Any) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=CONTEXT - 20, extra_body={"ignore_eos": True}
        )
    assert sdk.complete().choices[0].text


def test_a_stream_that_is_left_harms_no_later_request(sdk: Any) -> None:
    with sdk.complete(stream=True, max_tokens=200, extra_body={"ignore_eos": True}) as stream:
        assert next(iter(stream)).choices
    assert sdk.complete().choices[0].text


def test_an_answer_has_its_request_id_and_warnings_in_headers(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine"}, extra_body={"max_token": 1}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["pagewire-warning"].endswith("max_token")
    assert raw.parse()._request_id == "mine"


def test_the_asynchronous_client_gets_many_answers_at_once(url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            create = partial(client.completions.create, model=MODEL, temperature=0, max_tokens=6)
            answers = await asyncio.gather(*(create(prompt=PROMPT) for _ in range(16)))
            return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(ask())
    assert len(texts) == 16
    assert all(texts)


# Anthropic's client.


def test_a_message_and_its_stream_are_equal(claude: anthropic.Anthropic, message: Any) -> None:
    whole = message()
    assert (whole.stop_reason, whole.role, whole.usage.output_tokens) == ("max_tokens", "assistant", 6)
    events = list(message(stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == whole.content[0].text


def test_anthropics_stream_helper_collects_a_message(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=MODEL, max_tokens=6, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert isinstance(final.content[0], anthropic.types.TextBlock)
    assert (final.content[0].text, final.usage.output_tokens) == (text, 6)


def test_a_system_prompt_may_be_blocks(message: Any) -> None:
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert message(system=blocks).usage.input_tokens > 0


def test_a_stop_sequence_ends_a_message(message: Any) -> None:
    word = message().content[0].text.split()[1]
    stopped = message(stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_of_anthropic_is_called(message: Any, stream: bool) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = message(tools=[ANTHROPICS_TOOL], tool_choice=choice, max_tokens=LONG, stream=stream)
    if stream:
        events = list(answer)
        arguments = json.loads(
            "".join(event.delta.partial_json for event in events if event.type == "content_block_delta")
        )
        reason = next(event.delta.stop_reason for event in events if event.type == "message_delta")
    else:
        ((block,), reason) = (answer.content, answer.stop_reason)
        assert (block.type, block.name) == ("tool_use", "get_weather")
        arguments = block.input
    assert reason == "tool_use"
    assert arguments.keys() == {"city", "day"}


def test_an_anthropic_tools_result_is_answered(message: Any) -> None:
    turns = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "Sunny."}]},
    ]
    assert message(messages=turns, tools=[ANTHROPICS_TOOL], tool_choice={"type": "none"}).content[0].text


@pytest.mark.parametrize("fields", [{}, {"tools": [ANTHROPICS_TOOL]}, {"system": "Be brief."}])
def test_counted_tokens_equal_the_usage_of_the_prompt(
    claude: anthropic.Anthropic, message: Any, fields: dict[str, Any]
) -> None:
    usage = message(**fields).usage
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, **fields).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_anthropics_errors_are_raised_as_their_types(claude: anthropic.Anthropic, message: Any) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        message(messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError, match="other"):
        message(model="other")
    with pytest.raises(anthropic.NotFoundError, match="other"):
        claude.messages.count_tokens(model="other", messages=HELLO)
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.count_tokens(model=MODEL, messages=HELLO)
    with pytest.raises(anthropic.APITimeoutError):
        claude.with_options(timeout=0.001).messages.create(model=MODEL, max_tokens=400, messages=HELLO)
    assert message().content


def test_anthropics_client_lists_the_model(claude: anthropic.Anthropic) -> None:
    assert [model.id for model in claude.models.list()] == [MODEL]
