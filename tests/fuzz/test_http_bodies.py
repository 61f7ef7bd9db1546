"""Bodies of HTTP requests: each is answered in the right shape, and never with 500."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from pagewire.client.sync import LoopThread
from pagewire.services.gateway.answers.ollama_lines import MEDIA_TYPE
from pagewire.services.gateway.http.errors import OLLAMA
from pagewire.services.gateway.requests import (
    anthropic_request,
    chat_request,
    completion_request,
    responses_request,
    sampling_fields,
)
from pagewire.services.gateway.requests.ollama_request import OllamaChatRequest, OllamaGenerateRequest
from pagewire.services.gateway.routes.endpoint import Endpoint
from pagewire.services.gateway.service import APIS
from pagewire.shared.messages.client import SamplingParams
from tests.fuzz.fuzzing import fuzz, json_bytes
from tests.services.gateway.http_client import Answer, Gateway, start_gateway
from tests.support.responder import MODEL

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: list[dict[str, Any]] = [
    {"model": MODEL, "prompt": "x", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
    {"model": MODEL, "prompt": [5, 6], "n": 2, "temperature": 0.5, "stop": ["a"], "logit_bias": {}, "logprobs": None},
    {"prompt": ["x", "y"], "use_beam_search": True, "n": 2, "user": "u", "seed": 3, "request_id": "a"},
    {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "assistant", "tool_calls": [CALL]},
        ],
        "max_completion_tokens": 4,
        "chat_template_kwargs": {"a": [1]},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    },
    {
        "model": MODEL,
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
        ],
        "stream": True,
    },
    {
        "model": MODEL,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "max_output_tokens": 4,
    },
    {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": "x", "images": []},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "x", "tool_name": "f"},
        ],
        "prompt": "x",
        "raw": True,
        "stream": False,
        "format": {"type": "object"},
        "think": "low",
        "keep_alive": "5m",
        "options": {"num_predict": 4, "seed": -1, "stop": ["a"], "repeat_penalty": 1.1, "num_ctx": 4096},
    },
]
NAMES = sorted(
    {*SamplingParams.__struct_fields__, *completion_request.FIELDS, *chat_request.FIELDS}
    | anthropic_request.FIELDS
    | responses_request.FIELDS
    | {*OllamaChatRequest.__struct_fields__, *OllamaGenerateRequest.__struct_fields__}
    | sampling_fields.NEUTRAL.keys()
    | sampling_fields.IGNORED
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[LoopThread, Gateway]]:
    thread = LoopThread()
    yield thread, thread.run(start_gateway())
    thread.close()


@pytest.mark.parametrize("path", APIS)
def test_any_body_is_answered_or_refused(gateway: tuple[LoopThread, Gateway], path: str) -> None:
    thread, running = gateway
    assert isinstance(running.endpoints[path], Endpoint)

    def check(body: bytes) -> None:
        answer: Answer = thread.run(running.post(body, path))
        assert answer.status in {200, 400, 404, 408, 413}, (answer.status, answer.body)
        if answer.status != 200:
            error = answer.json["error"]
            if not path.startswith(OLLAMA):
                assert error["code"] if "code" in error else error["type"]
                error = error["message"]
            assert error
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.chunks[-1].endswith(b"\n\n")
        elif answer.headers["content-type"] == MEDIA_TYPE:
            last = msgspec.json.decode(answer.body.splitlines()[-1])
            assert last.get("done") or last.get("error")
        else:
            assert answer.json.keys() & {"choices", "content", "output", "input_tokens", "message", "response"}

    fuzz(json_bytes(BODIES, NAMES), check, known=KNOWN, batch=50, share=0.5)


KNOWN = [
    msgspec.json.encode({"prompt": "x", "max_tokens": 2**64}),
    b'{"prompt": [99999999999999999999]}',
    b"[" * 50_000,
    b'{"metadata": ' + b"[" * 50_000,
    b"\xff\xfe",
]


def test_any_header_is_answered(gateway: tuple[LoopThread, Gateway]) -> None:
    thread, running = gateway

    def check(headers: dict[str, str]) -> None:
        answer = thread.run(running.call("POST", "/v1/completions", b'{"prompt": "x"}', headers))
        assert answer.status == 200, answer.body

    names = st.sampled_from(["traceparent", "tracestate", "content-type", "authorization", "accept", "x"])
    traces = st.from_regex(r"0[0-9a-f]-[0-9a-f]{31,33}-[0-9a-f]{15,17}-[0-9a-f]{1,2}", fullmatch=True)
    fuzz(st.dictionaries(names, st.one_of(st.text(max_size=30), traces), max_size=3), check, share=0.5)
