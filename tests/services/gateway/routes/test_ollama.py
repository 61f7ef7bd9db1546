"""`/api/chat` and `/api/generate`, over a pipeline with a script."""

from typing import Any

import msgspec
import pytest

from pagewire.shared.errors import ContextLength, ContextLengths, Overloaded
from pagewire.shared.messages.client import (
    ChatFormat,
    Choice,
    Delta,
    Final,
    FinalChoice,
    Frame,
    GenerateRequest,
    Logprob,
    Result,
    Usage,
)
from pagewire.shared.messages.request_metrics import Metrics
from tests.services.gateway.http_client import Answer, Gateway, start_gateway
from tests.support.responder import MODEL, WORDS, deltas

pytestmark = pytest.mark.anyio

CHAT, GENERATE = "/api/chat", "/api/generate"
TEXT = "".join(WORDS)
HELLO = [{"role": "user", "content": "Hello!"}]
TOOL = {"function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Paris"}}\n</tool_call>'
METRICS = Metrics(0.5, 1.0, 2.0, 3.75)


async def chat(gateway: Gateway, **fields: Any) -> Answer:
    return await gateway.post({"model": MODEL, "messages": HELLO, **fields}, CHAT)


async def generate(gateway: Gateway, **fields: Any) -> Answer:
    return await gateway.post({"model": MODEL, "prompt": "Hello!", **fields}, GENERATE)


def lines_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [msgspec.json.decode(line) for line in answer.body.splitlines()]


def answer_with(gateway: Gateway, text: str, form: ChatFormat | None = None) -> None:
    """Has the model write a text, whole or a character at a time."""
    gateway.responder.chat_format = form

    def script(request: GenerateRequest) -> list[Any]:
        if not request.stream:
            whole = Choice(0, text, [5, 6], "stop")
            return [Result("r", [whole], Usage(7, 2), chat_format=form, metrics=METRICS)]
        parts: list[Frame] = [Delta(0, start, letter, [5]) for start, letter in enumerate(text)]
        return [*parts, Final("r", [FinalChoice(0, "stop")], Usage(7, len(text)), metrics=METRICS), None]

    gateway.responder.script = script


async def test_a_chat_is_a_stream_of_lines_unless_the_request_says_otherwise(gateway: Gateway) -> None:
    *lines, last = lines_of(await chat(gateway))
    assert "".join(line["message"]["content"] for line in lines) == TEXT
    assert {(line["model"], line["done"], line["message"]["role"]) for line in lines} == {(MODEL, False, "assistant")}
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "length", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (3, len(WORDS))
    assert (await chat(gateway, stream=False)).json["message"] == {"role": "assistant", "content": TEXT}


async def test_an_answer_has_ollamas_figures(gateway: Gateway) -> None:
    answer_with(gateway, "Hi")
    whole = (await generate(gateway, stream=False)).json
    assert whole.pop("created_at").endswith("Z")
    assert whole == {
        "model": MODEL,
        "response": "Hi",
        "done": True,
        "done_reason": "stop",
        "total_duration": 3_750_000_000,
        "load_duration": 0,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 1_000_000_000,
        "eval_count": 2,
        "eval_duration": 2_000_000_000,
    }
    *lines, last = lines_of(await generate(gateway))
    assert [line["response"] for line in lines] == ["H", "i"]
    assert last.keys() == whole.keys() | {"created_at"}


async def test_reasoning_and_calls_are_parts_of_a_message(gateway: Gateway) -> None:
    answer_with(gateway, f"<think>Well.</think>I look.{CALL}", ChatFormat("hermes", "think"))
    whole = (await chat(gateway, tools=[TOOL], stream=False)).json["message"]
    (call,) = whole["tool_calls"]
    assert (whole["thinking"], whole["content"]) == ("Well.", "I look.")
    assert call["function"] == {"index": 0, "name": "look", "arguments": {"at": "Paris"}}
    *lines, last = lines_of(await chat(gateway, tools=[TOOL]))
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Well."
    assert "".join(line["message"]["content"] for line in lines) == "I look."
    (calls,) = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert [each["function"] for each in calls] == [call["function"]]
    assert last["done_reason"] == "stop"


async def test_a_call_that_was_cut_is_left_out(gateway: Gateway) -> None:
    answer_with(gateway, CALL[:40], ChatFormat("hermes"))
    assert "tool_calls" not in (await chat(gateway, tools=[TOOL], stream=False)).json["message"]
    assert all("tool_calls" not in line["message"] for line in lines_of(await chat(gateway, tools=[TOOL])))


async def test_a_conversation_with_tools_reaches_the_pipeline(gateway: Gateway) -> None:
    calls = [{"function": {"name": name, "arguments": {"at": name}}} for name in ("look", "read")]
    turns = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_name": "read", "content": "text"},
        {"role": "tool", "content": "view"},
        {"role": "tool", "tool_call_id": "mine", "content": "more"},
    ]
    await chat(gateway, messages=turns, tools=[TOOL])
    (request,) = gateway.responder.requests
    assert request.messages is not None
    _, answer, *results = request.messages
    assert answer.reasoning_content == "Well."
    assert answer.tool_calls is not None
    first, second = (call["id"] for call in answer.tool_calls)
    assert [result.tool_call_id for result in results] == [second, first, "mine"]
    assert len(first) == 9
    assert answer.tool_calls[0]["function"] == {"name": "look", "arguments": {"at": "look"}}
    assert request.tools == [{"type": "function", **TOOL}]


async def test_options_become_sampling_parameters(gateway: Gateway) -> None:
    options = {"num_predict": 9, "temperature": 0.5, "top_k": 3, "seed": 5, "stop": ["x"], "repeat_penalty": 1.1}
    answer = await chat(gateway, options=options | {"num_ctx": 4096, "mirostat": 1, "tempratur": 1})
    sampling = gateway.responder.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (9, 0.5, 3, 5)
    assert (sampling.stop, sampling.repetition_penalty) == (["x"], 1.1)
    assert answer.headers["pagewire-warning"] == "ignored unknown fields: tempratur; left out: option mirostat"
    await generate(gateway, raw=True, options={"num_predict": -1, "seed": -1})
    request = gateway.responder.requests[1]
    assert (request.sampling.max_tokens, request.sampling.seed, request.clamp_max_tokens) == (None, None, True)


async def test_whole_numbers_may_have_a_point(gateway: Gateway) -> None:
    await chat(gateway, options={"num_predict": 9.0, "top_k": 3.7, "seed": 5.0, "temperature": 1})
    sampling = gateway.responder.requests[0].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed, sampling.temperature) == (9, 3, 5, 1.0)


@pytest.mark.parametrize("name", ["num_predict", "top_k", "seed"])
@pytest.mark.parametrize("value", ["many", True, [1], 1e300])
async def test_an_option_that_is_no_number_is_refused_by_its_name(gateway: Gateway, name: str, value: object) -> None:
    answer = await chat(gateway, options={name: value})
    assert (answer.status, gateway.responder.requests) == (400, [])
    assert name in answer.json["error"]


async def test_the_answer_goes_on_where_the_text_of_the_assistant_ends(gateway: Gateway) -> None:
    await chat(gateway, messages=[*HELLO, {"role": "assistant", "content": "The capital is"}])
    await chat(gateway, messages=[*HELLO, {"role": "assistant", "content": ""}])
    open_ended, ended = gateway.responder.requests
    assert (open_ended.continue_final_message, open_ended.add_generation_prompt) == (True, False)
    assert (ended.continue_final_message, ended.add_generation_prompt) == (False, None)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_format_binds_the_answer(gateway: Gateway, path: str) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    for form in ("", "json", schema):
        await gateway.post({"format": form, **({"messages": HELLO} if path == CHAT else {"prompt": "Hello!"})}, path)
    plain, free, bound = (request.sampling.structured_outputs for request in gateway.responder.requests)
    assert plain is None
    assert free is not None
    assert bound is not None
    assert (free.json_object, bound.json) == (True, schema)


@pytest.mark.parametrize(
    ("think", "variables"),
    [(True, {"enable_thinking": True}), (False, {"enable_thinking": False}), ("low", {"reasoning_effort": "low"})],
)
async def test_think_reaches_the_chat_template(gateway: Gateway, think: object, variables: dict[str, object]) -> None:
    await chat(gateway, think=think)
    assert gateway.responder.requests[0].chat_template_kwargs == variables


async def test_a_prompt_is_a_chat_unless_it_is_raw(gateway: Gateway) -> None:
    await generate(gateway, system="Be brief.")
    await generate(gateway, raw=True)
    chatting, raw = gateway.responder.requests
    assert [(turn.role, turn.content) for turn in chatting.messages or ()] == [
        ("system", "Be brief."),
        ("user", "Hello!"),
    ]
    assert (raw.messages, raw.prompt) == (None, "Hello!")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_request_without_a_text_loads_the_model(gateway: Gateway, path: str, *, stream: bool) -> None:
    answer = await gateway.post({"model": MODEL, "keep_alive": "10m", "stream": stream}, path)
    (line,) = lines_of(answer) if stream else [answer.json]
    assert (line["done"], line["done_reason"]) == (True, "load")
    assert "eval_count" not in line
    (request,) = gateway.responder.requests
    assert request.sampling.max_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_come_with_their_text(gateway: Gateway, *, stream: bool) -> None:
    first = {5: Logprob(-0.5, 1, "Hi"), 6: Logprob(-1.5, 2, "Ho")}
    whole = Result("r", [Choice(0, "Hi", [5], "stop", logprobs=[first])], Usage(3, 1))
    parts: list[Any] = [Delta(0, 0, "Hi", [5], [first]), Final("r", [FinalChoice(0, "stop")], Usage(3, 1)), None]
    gateway.responder.script = lambda request: parts if request.stream else [whole]
    answer = await chat(gateway, stream=stream, logprobs=True, top_logprobs=2)
    (token,) = (lines_of(answer)[0] if stream else answer.json)["logprobs"]
    assert (token["token"], token["logprob"]) == ("Hi", -0.5)
    assert [each["token"] for each in token["top_logprobs"]] == ["Hi", "Ho"]


async def test_the_tag_latest_means_the_name_without_it(gateway: Gateway) -> None:
    assert (await chat(gateway, model=f"{MODEL}:latest")).status == 200
    answer = await chat(gateway, model="other:latest")
    assert (answer.status, "other" in answer.json["error"]) == (404, True)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_every_error_of_these_paths_is_a_text(gateway: Gateway, path: str) -> None:
    for answer in (
        await gateway.post(b"{", path),
        await gateway.post({"messages": HELLO, "prompt": "x", "model": "other"}, path),
        await gateway.get(path),
        await (await start_gateway(api_key="secret")).post({}, path),
    ):
        assert answer.json.keys() == {"error"}, answer.body
        assert isinstance(answer.json["error"], str)
        assert answer.status in {400, 401, 404, 405}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ({"messages": "hi"}, "messages"),
        ({"format": "xml"}, "format"),
        ({"options": {"temperature": "hot"}}, "temperature"),
        ({"options": []}, "options"),
        ({"think": "much"}, "think"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"messages": [], "keep_alive": 0}, "--idle-unload"),
        ({"tools": [3]}, "tools"),
    ],
)
async def test_a_wrong_field_is_named(gateway: Gateway, fields: dict[str, Any], part: str) -> None:
    answer = await chat(gateway, **fields)
    assert (answer.status, part in answer.json["error"]) == (400, True), answer.body


async def test_images_of_a_prompt_are_refused_by_name(gateway: Gateway) -> None:
    answer = await generate(gateway, images=["aGk="])
    assert (answer.status, "images" in answer.json["error"]) == (400, True)


async def test_an_error_before_the_first_token_sets_the_status(gateway: Gateway) -> None:
    gateway.responder.script = lambda request: [Overloaded("busy", 2000)]
    answer = await chat(gateway)
    assert (answer.status, answer.headers["retry-after"], answer.json) == (429, "2", {"error": "busy"})
    gateway.responder.script = lambda request: [ContextLength("long", lengths=ContextLengths(99, 0, 64))]
    assert (await chat(gateway)).status == 400


async def test_an_error_in_a_stream_is_its_last_line(gateway: Gateway) -> None:
    gateway.responder.script = lambda request: [*deltas(), Overloaded("busy", 2000)]
    *lines, last = lines_of(await chat(gateway))
    assert lines
    assert last == {"error": "busy"}
