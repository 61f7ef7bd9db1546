"""`/v1/chat/completions` over a pipeline with a script."""

from typing import Any

import pytest

from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import (
    ChatFormat,
    ChatMessage,
    Delta,
    Final,
    FinalChoice,
    SamplingParams,
    TextPart,
    TokenOrigin,
    Usage,
)
from tests.services.gateway.http_client import Answer, Gateway
from tests.support.responder import MODEL, WORDS

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TEXT = "".join(WORDS)
HELLO = [{"role": "user", "content": "Hello!"}]


async def chat(gateway: Gateway, **fields: Any) -> Answer:
    return await gateway.post({"model": MODEL, "messages": HELLO, **fields}, CHAT)


async def test_a_chat_completion_has_openais_shape(gateway: Gateway) -> None:
    answer = await chat(gateway, n=2, request_id="r1")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    body = answer.json
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-r1", "chat.completion", MODEL)
    assert body["choices"][1] == {
        "index": 1,
        "message": {"role": "assistant", "content": TEXT, "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"]["total_tokens"] == 7
    assert gateway.endpoints[CHAT].served == 1


async def test_a_stream_has_the_role_then_the_texts_then_the_finish_reasons(gateway: Gateway) -> None:
    events = (await chat(gateway, stream=True, n=2)).events
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    for index in (0, 1):
        mine = [choice for choice in choices[2:] if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == TEXT
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["delta"] == {}
        assert all("role" not in choice["delta"] for choice in mine)


async def test_a_stream_without_text_has_the_role_too(gateway: Gateway) -> None:
    end = Final("r1", [FinalChoice(0, "stop")], Usage(3, 0))
    gateway.responder.script = lambda request: [end, None]
    events = (await chat(gateway, stream=True)).events
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_usage_comes_last_or_with_every_event(gateway: Gateway) -> None:
    plain = (await chat(gateway, stream=True)).events
    assert all(event["usage"] is None and event["choices"] for event in plain)
    *others, last = (await chat(gateway, stream=True, stream_options={"include_usage": True})).events
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 8)
    assert all(event["usage"] is None for event in others)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *others, last = (await chat(gateway, stream=True, stream_options=options)).events
    counts = [event["usage"]["completion_tokens"] for event in others]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert {event["usage"]["prompt_tokens"] for event in others} == {3}


async def test_every_field_reaches_the_pipeline(gateway: Gateway) -> None:
    parts = [{"type": "text", "text": "Hi."}]
    await chat(
        gateway,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}], "refusal": None, "audio": None},
            {"role": "tool", "content": "4", "tool_call_id": "a"},
        ],
        user="ann",
        cache_salt="salt",
        priority=2,
        continue_final_message=True,
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
        temperature=0.5,
        top_k=5,
        stop="end",
        seed=3,
        logit_bias={"7": 1},
    )
    request = gateway.responder.requests[0]
    assert request.messages == [
        ChatMessage("developer", "Be brief."),
        ChatMessage("user", [TextPart("Hi.")], name="ann"),
        ChatMessage("assistant", tool_calls=[{"id": "a"}]),
        ChatMessage("tool", "4", tool_call_id="a"),
    ]
    assert (request.user, request.cache_salt, request.priority) == ("ann", "salt", 2)
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    assert request.chat_template_kwargs == {"enable_thinking": False}
    assert request.sampling == SamplingParams(
        max_tokens=None, temperature=0.5, top_k=5, stop="end", seed=3, logit_bias={7: 1.0}
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": None}, 7),
    ],
)
async def test_a_chat_without_max_tokens_runs_to_the_context_limit(
    gateway: Gateway, fields: dict[str, Any], expected: int | None
) -> None:
    await chat(gateway, **fields)
    assert gateway.responder.requests[0].sampling.max_tokens == expected


async def test_a_beam_search_has_as_many_beams_as_answers(gateway: Gateway) -> None:
    await chat(gateway, use_beam_search=True, n=3)
    assert gateway.responder.requests[0].sampling == SamplingParams(n=3, beam_width=3, max_tokens=None)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_fields_without_effect_are_accepted_on_both_routes(gateway: Gateway, path: str) -> None:
    nothing = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logprobs": False,
        "logit_bias": {},
        "stop": None,
        "stream": None,
        "stream_options": None,
        "seed": None,
    }
    body = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    assert (await gateway.post({**body, **nothing}, path)).status == 200


async def test_an_invalid_field_is_named(gateway: Gateway) -> None:
    async def blamed(gateway: Gateway, **fields: Any) -> Any:
        answer = await chat(gateway, **fields)
        assert answer.status == 400, answer.body
        return answer.json["error"]["param"]

    assert await blamed(gateway, guided_regex="a") == "guided_regex"
    assert await blamed(gateway, max_tokens="3") == "max_tokens"
    assert await blamed(gateway, temperature="hot") == "temperature"
    assert await blamed(gateway, tools="f") == "tools"
    assert await blamed(gateway, response_format={"type": "xml"}) == "response_format"
    assert await blamed(gateway, top_logprobs=2) == "top_logprobs"
    assert await blamed(gateway, echo=True) == "echo"
    assert await blamed(gateway, messages="hi") == "messages"
    assert await blamed(gateway, messages=None) == "messages"
    assert await blamed(gateway, messages=[{"role": "user"}]) == "messages"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert await blamed(gateway, messages=[{"role": "user", "content": [image]}]) == "messages"
    assert await blamed(gateway, prompt="x") == "prompt"
    gateway.responder.script = lambda request: [
        InvalidRequest("this model has no chat template: send a prompt"),
        None,
    ]
    answer = await chat(gateway)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert "no chat template" in answer.json["error"]["message"]


async def test_another_method_is_not_allowed(gateway: Gateway) -> None:
    assert (await gateway.get(CHAT)).status == 405


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_events_have_the_origin_of_tokens_on_request(gateway: Gateway, path: str) -> None:
    origins: tuple[TokenOrigin, ...] = ("sampled", "drafted", "forced")
    parts = [
        Delta(0, start, word, [start], origin=origin)
        for start, (word, origin) in enumerate(zip("abc", origins, strict=True))
    ]
    gateway.responder.script = lambda request: [*parts, Final("r1", [FinalChoice(0, "stop")], Usage(3, 3)), None]
    body = {"model": MODEL, "messages": HELLO} if path == CHAT else {"model": MODEL, "prompt": "x"}
    for form in (None, ChatFormat(reasoning="think")):
        gateway.responder.chat_format = form
        events = (await gateway.post({**body, "stream": True, "return_token_origins": True}, path)).events
        choices = [event["choices"][0] for event in events if event["choices"]]
        tokens = [choice["token_origin"] for choice in choices if "token_origin" in choice]
        assert [(token["text"], token["origin"]) for token in tokens] == list(zip("abc", origins, strict=True))
    assert all(request.return_token_origins for request in gateway.responder.requests)
