"""Log-probabilities over HTTP, in the formats of OpenAI's two routes, whole and in streams."""

from typing import Any

import pytest

from pagewire.shared.errors import RequestError
from pagewire.shared.messages.client import (
    Accepted,
    Choice,
    Delta,
    Final,
    FinalChoice,
    Frame,
    GenerateRequest,
    Logprob,
    Result,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from tests.services.gateway.http_client import Gateway
from tests.support.responder import MODEL

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
GENERATED: list[TokenLogprobs] = [
    {5: Logprob(-2.0, 3, "é"), 6: Logprob(-0.5, 1, "a"), 7: Logprob(-1.0, 2, "b")},
    {6: Logprob(-0.25, 1, "xyz"), 7: Logprob(-9999.0, 2, "c")},
]
PROMPT: list[TokenLogprobs | None] = [None, {8: Logprob(-3.0, 9, "lo"), 9: Logprob(-0.1, 1, "p")}]


def answer(request: GenerateRequest) -> list[Frame | RequestError | None]:
    """Two tokens, the first of which shows no text yet."""
    logprobs = GENERATED if request.sampling.logprobs is not None else None
    echoes = request.sampling.prompt_logprobs is not None
    prompts = ([[4, 8]], [PROMPT]) if echoes else (None, None)
    if not request.stream:
        return [Result("r1", [Choice(0, "éxyz", [5, 6], "length", None, logprobs)], Usage(2, 2), *prompts)]
    parts = [Delta(0, i, text, [5 + i], logprobs and [logprobs[i]]) for i, text in enumerate(("", "éxyz"))]
    if echoes:
        parts[0].prompt_logprobs = PROMPT
    accepted = Accepted("r1", "c", "r", 2, prompt_token_ids=[[4, 8]])
    return [accepted, *parts, Final("r1", [FinalChoice(0, "length")], Usage(2, 2), *prompts), None]


async def ask(gateway: Gateway, path: str = "/v1/completions", **fields: Any) -> Any:
    gateway.responder.script = answer
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hallo"}
    reply = await gateway.post({"model": MODEL, **prompt, **fields}, path)
    assert reply.status == 200, reply.body
    return reply.events if fields.get("stream") else reply.json


async def test_a_completion_has_columns(gateway: Gateway) -> None:
    body = await ask(gateway, logprobs=2)
    assert gateway.responder.requests[0].sampling == SamplingParams(logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-2.0, -0.25],
        "tokens": ["é", "xyz"],
        "top_logprobs": [{"é": -2.0, "a": -0.5, "b": -1.0}, {"xyz": -0.25, "c": -9999.0}],
    }
    assert "prompt_logprobs" not in body["choices"][0]


async def test_an_echoed_prompt_comes_first(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def detokenize(_client: object, ids: list[int], _model: str) -> str:
        return {(4,): "hal", (4, 8): "hallo"}[tuple(ids)]

    monkeypatch.setattr("pagewire.client.async_client.AsyncClient.detokenize", detokenize)
    for prompt in ("hallo", [4, 8]):
        (choice,) = (await ask(gateway, logprobs=2, echo=True, prompt=prompt))["choices"]
        assert choice["text"] == "halloéxyz"
        assert choice["logprobs"]["tokens"] == ["hal", "lo", "é", "xyz"]
        assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -2.0, -0.25]
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"lo": -3.0, "p": -0.1}]
        assert choice["logprobs"]["text_offset"] == [0, 3, 5, 6]
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1]["8"] == {"logprob": -3.0, "rank": 9, "decoded_token": "lo"}
    assert gateway.responder.requests[0].sampling == SamplingParams(logprobs=2, prompt_logprobs=2)


async def test_an_answer_may_be_the_prompt_alone(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """As harnesses ask for the probability of a text."""

    async def detokenize(_client: object, _ids: list[int], _model: str) -> str:
        return "hal"

    monkeypatch.setattr("pagewire.client.async_client.AsyncClient.detokenize", detokenize)
    body = await ask(gateway, logprobs=1, echo=True, max_tokens=0)
    assert gateway.responder.requests[0].sampling.max_tokens == 1
    assert body["choices"][0]["text"] == "hallo"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -3.0]
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["total_tokens"] == 2


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 1}])
async def test_a_prompt_alone_has_log_probabilities_only_if_they_are_asked_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    async def detokenize(_client: object, _ids: list[int], _model: str) -> str:
        return "hal"

    monkeypatch.setattr("pagewire.client.async_client.AsyncClient.detokenize", detokenize)
    (choice,) = (await ask(gateway, echo=True, max_tokens=0, **fields))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("hallo", None)
    first, *_ = await ask(gateway, echo=True, max_tokens=0, stream=True, return_token_ids=True, **fields)
    assert (first["choices"][0]["text"], first["choices"][0]["logprobs"]) == ("hallo", None)
    assert first["choices"][0]["prompt_token_ids"] == [4, 8]


async def test_an_echo_in_a_stream_is_the_first_event(gateway: Gateway) -> None:
    events = await ask(gateway, echo=True, stream=True)
    assert [event["choices"][0]["text"] for event in events] == ["hallo", "éxyz", ""]


async def test_a_stream_of_completions_has_an_event_per_token(gateway: Gateway) -> None:
    *parts, end = await ask(gateway, logprobs=2, stream=True)
    assert [part["choices"][0]["text"] for part in parts] == ["", "éxyz"]
    assert [part["choices"][0]["logprobs"]["tokens"] for part in parts] == [["é"], ["xyz"]]
    assert [part["choices"][0]["logprobs"]["text_offset"] for part in parts] == [[0], [1]]
    assert end["choices"][0]["logprobs"] is None


async def test_a_chat_has_the_likeliest_of_each_token(gateway: Gateway) -> None:
    body = await ask(gateway, CHAT, logprobs=True, top_logprobs=1, prompt_logprobs=1)
    sampling = gateway.responder.requests[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (1, 1)
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "é",
        "logprob": -2.0,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }
    assert second["top_logprobs"] == [{"token": "xyz", "logprob": -0.25, "bytes": [120, 121, 122]}]
    assert body["prompt_logprobs"][0] is None


async def test_a_stream_of_a_chat_has_an_event_per_token(gateway: Gateway) -> None:
    begin, *parts, _ = await ask(gateway, CHAT, logprobs=True, stream=True)
    assert begin["choices"][0]["delta"]["role"] == "assistant"
    assert [part["choices"][0]["logprobs"]["content"][0]["token"] for part in parts] == ["é", "xyz"]
    assert parts[0]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert gateway.responder.requests[0].sampling.logprobs == 0
