"""Chat with a running stack: the official client over HTTP, ours over NATS, and offline."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pagewire import LLM, AsyncClient, Client, SamplingParams
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ChatFormat
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.pagewire.serving import Served, serving
from tests.support.model_folders import change

ASKED = "Tell me about the rabbit."
HELLO: Any = [{"role": "user", "content": ASKED}]
LAID_OUT = f"User: {ASKED}\nAssistant:"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def stack() -> Iterator[Served]:
    with serving("--model", "bundled") as served:
        yield served


@pytest.fixture
def chat(stack: Served) -> Iterator[Any]:
    """OpenAI's own client, at its chat completions."""
    with openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0) as client:
        yield client.chat.completions


@pytest.fixture
def client(stack: Served) -> Iterator[Client]:
    with Client(stack.nats) as client:
        yield client


@pytest.fixture
def expected(client: Client) -> str:
    """The model's continuation of the conversation, as its template renders it."""
    return client.generate(LAID_OUT, **GREEDY).choices[0].text


def test_the_prompt_equals_transformers_prompt(chat: Any, client: Client) -> None:
    tokenizer = load_tokenizer(BUNDLED).to_transformers()
    turns = [{"role": "system", "content": "Be kind."}, *HELLO, {"role": "assistant", "content": "No."}, *HELLO]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == f"Be kind.\nUser: {ASKED}\nAssistant: No.\n{LAID_OUT}"
    answer = chat.create(model="bundled", messages=turns, **GREEDY)
    assert answer.usage.prompt_tokens == len(client.tokenize(str(text)))
    assert answer.choices[0].message.content == client.generate(str(text), **GREEDY).choices[0].text


def test_an_answer_has_openais_shape(chat: Any, expected: str) -> None:
    answer = chat.create(model="bundled", messages=HELLO, **GREEDY)
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
    assert answer.usage.completion_tokens == 12


def test_a_stream_ends_with_its_usage(chat: Any, expected: str) -> None:
    chunks = list(
        chat.create(model="bundled", messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


def test_content_in_parts_and_the_role_developer_are_taken(chat: Any) -> None:
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]
    several = chat.create(
        model="bundled",
        messages=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}],
        **GREEDY,
    )
    joined = chat.create(
        model="bundled",
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me\na story."}],
        **GREEDY,
    )
    assert several.choices == joined.choices
    assert several.usage.prompt_tokens == joined.usage.prompt_tokens


def test_every_field_of_a_chat_is_taken(chat: Any) -> None:
    answer = chat.create(
        model="bundled",
        messages=HELLO,
        n=2,
        seed=1,
        temperature=0.8,
        top_p=0.9,
        stop=["\n"],
        user="me",
        max_completion_tokens=5,
        max_tokens=50,
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        tool_choice="none",
        response_format={"type": "text"},
        logprobs=False,
        logit_bias={},
        extra_body={"top_k": 5, "min_p": 0.01, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert len(answer.choices) == 2
    assert all(choice.finish_reason in {"length", "stop"} for choice in answer.choices)
    assert answer.usage.completion_tokens <= 10


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_response_format(chat: Any, stream: bool) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}
    response_format = {"type": "json_schema", "json_schema": {"name": "letters", "schema": schema, "strict": True}}
    answer = chat.create(
        model="bundled", messages=HELLO, response_format=response_format, max_tokens=60, seed=1, stream=stream
    )
    if stream:
        text = "".join(event.choices[0].delta.content or "" for event in answer)
    else:
        text = answer.choices[0].message.content
    assert 2 <= len(json.loads(text)) <= 3
    assert set(json.loads(text)) <= {"a", "b"}


def test_the_final_message_is_continued(chat: Any, client: Client) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "Once upon a"}]
    answer = chat.create(model="bundled", messages=turns, extra_body={"continue_final_message": True}, **GREEDY)
    expected = client.generate(f"User: {ASKED}\nAssistant: Once upon a", **GREEDY).choices[0].text
    assert answer.choices[0].message.content == expected


def test_without_a_number_a_chat_runs_to_the_context_limit(chat: Any) -> None:
    answer = chat.create(
        model="bundled",
        messages=[{"role": "user", "content": "word " * 1940}],
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.total_tokens == 2048
    assert answer.usage.completion_tokens > 16


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "the role wizard is none of"),
        ({"messages": HELLO, "temperature": 9}, "temperature"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools must be functions"),
        ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format is malformed"),
        (
            {"messages": HELLO, "extra_body": {"structured_outputs": {"regex": "(a"}}},
            "structured_outputs.regex cannot be compiled: .* invalid regex",
        ),
        ({"messages": HELLO, "extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"messages": HELLO, "extra_body": {"chat_template_kwargs": {"x": 2**70}}}, "64 bits"),
        ({"messages": HELLO, "extra_body": {"chat_template": "{{ x }}"}}, "chat_template"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_field_is_a_400_that_names_it(chat: Any, fields: dict[str, Any], named: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=named) as caught:
        chat.create(model="bundled", stream=stream, **fields)
    assert caught.value.type == "invalid_request_error"


def test_the_synchronous_client_chats(client: Client, expected: str) -> None:
    assert client.chat(HELLO, **GREEDY).choices[0].text == expected
    assert client.chat(HELLO, SamplingParams(**GREEDY)).choices[0].text == expected
    assert "".join(delta.text for delta in client.stream_chat(HELLO, **GREEDY)) == expected


@pytest.mark.anyio
async def test_the_asynchronous_client_chats(stack: Served, expected: str) -> None:
    async with AsyncClient(stack.nats) as client:
        assert (await client.chat(HELLO, **GREEDY)).choices[0].text == expected
        assert "".join([delta.text async for delta in client.stream_chat(HELLO, **GREEDY)]) == expected
        turns = [*HELLO, {"role": "assistant", "content": "Once upon a"}]
        continued = await client.chat(turns, continue_final_message=True, **GREEDY)
        assert continued.usage.prompt_tokens == len(await client.tokenize(LAID_OUT + " Once upon a"))
        with pytest.raises(InvalidRequest, match="the role wizard"):
            await client.chat([{"role": "wizard", "content": "x"}])


def test_offline_chats_use_the_models_template_and_defaults(tmp_path: Path, expected: str) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for file in BUNDLED.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    change(folder / "generation_config.json", temperature=0.0, max_new_tokens=12)
    template = tmp_path / "template.jinja"
    template.write_text(
        (BUNDLED / "chat_template.jinja").read_text()
        + "{{ mood }}{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %}"
    )
    with LLM(str(folder), chat_template=str(template), tool_call_parser="hermes") as llm:
        (one,) = llm.chat(HELLO)
        assert (one.outputs[0].text, one.usage.completion_tokens) == (expected, 12)
        (output,) = llm.chat(HELLO, SamplingParams(temperature=0.0, max_tokens=3))
        assert output.usage.completion_tokens == 3
        two = llm.chat([HELLO, [{"role": "user", "content": "Good night."}]], SamplingParams(**GREEDY))
        assert [len(result.outputs[0].token_ids) for result in two] == [12, 12]
        assert two[0].outputs[0].text == expected
        (moody,) = llm.chat(HELLO, chat_template_kwargs={"mood": " Alas"})
        (spelled,) = llm.generate(LAID_OUT + " Alas")
        assert moody.outputs[0].text == spelled.outputs[0].text
        (shown,) = llm.chat(HELLO, tools=[{"type": "function", "function": {"name": "Alas"}}])
        assert (shown.outputs, shown.chat_format) == (spelled.outputs, ChatFormat("hermes"))
        with pytest.raises(InvalidRequest, match="the role wizard"):
            llm.chat([{"role": "wizard", "content": "x"}])
