"""Bad input over HTTP against the real stack: each is refused with the reason, and nothing is counted as a fault."""

import http.client
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import msgspec
import pytest

from pagewire.services.gateway.openapi import ROUTES, fields
from pagewire.shared.settings.config import Settings
from tests.support.stack_thread import stack_url
from tests.support.waiting import PATIENCE

HUGE = [2**64, -(2**64), 10**30]
KEY = "a-key-for-everyone"
CHAT = [{"role": "user", "content": "x"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/api/chat": {"model": "bundled", "messages": CHAT, "options": {"num_predict": 1}, "stream": False},
    "/api/generate": {"model": "bundled", "prompt": "x", "options": {"num_predict": 1}, "stream": False},
    "/api/show": {"model": "bundled"},
}
ADAPTERS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""Routes that only stacks with adapters have."""
GENERATING = [path for path in VALID if path.startswith("/v1") and not path.endswith("count_tokens")]
MALFORMED = {
    "empty": b"",
    "cut off": b'{"model": "bun',
    "no object": b"[]",
    "null": b"null",
    "not UTF-8": b'{"model": "\xff"}',
    "half of a pair": b'{"model": "\\ud800"}',
    "deep": b'{"a":' * 100_000,
    "deep in a field": b'{"metadata": ' + b"[" * 100_000,
}
WRONG: dict[str, Any] = {"boolean": True, "string": "x", "integer": 1.5, "array": [None]}
"""A value of each type."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = Settings(model="bundled", device="sim:zero", port=0, nats_port=0, log_level="error", api_key=KEY)
    with stack_url(settings) as url:
        yield url


def post(url: str, body: Any, path: str = "/v1/completions", scheme: str = "Bearer") -> httpx.Response:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {"Authorization": f"{scheme} {KEY}"}
    # Without `verify`, it would read the certificates of all authorities for each request.
    return httpx.post(url + path, content=data, headers=headers, timeout=PATIENCE, verify=False)


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("field", ["max_tokens", "top_k", "n", "seed", "min_tokens", "priority"])
def test_an_integer_of_more_than_64_bits_is_refused_by_name(url: str, field: str, number: int) -> None:
    answer = post(url, b'{"prompt": "x", "%s": %d}' % (field.encode(), number))
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize(("name", "body"), [("prompt", b"[%d]"), ("stop_token_ids", b'"x", "stop_token_ids": [%d]')])
def test_an_integer_of_more_than_64_bits_in_a_list_is_refused(url: str, name: str, body: bytes, number: int) -> None:
    answer = post(url, b'{"prompt": ' + body % number + b"}")
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("start", [b"[", b'{"a":', b'{"prompt": ' + b"[" * 9, b'{"metadata": ' + b"[" * 9])
def test_deep_nesting_is_refused(url: str, start: bytes) -> None:
    assert post(url, start * 50_000).status_code == 400
    chat = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %s}}'
    answer = post(url, chat % (b"[" * 100 + b"]" * 100), "/v1/chat/completions")
    assert answer.status_code == 400
    assert "chat_template_kwargs" in answer.json()["error"]["message"]


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer"])
def test_the_scheme_of_the_key_is_read_in_any_case(url: str, scheme: str) -> None:
    assert post(url, {"prompt": "x", "max_tokens": 1}, scheme=scheme).status_code == 200


@pytest.mark.parametrize("field", [{"logit_bias": {}}, {"logprobs": None}, {"logit_bias": None}, {"tools": []}])
def test_a_field_with_an_empty_value_has_no_effect(url: str, field: dict[str, Any]) -> None:
    assert post(url, {"prompt": "x", "max_tokens": 1, **field}).status_code == 200


def refusal(answer: httpx.Response, path: str) -> str:
    """Returns what an error says, which has the shape of its route: OpenAI's, Anthropic's or Ollama's."""
    body = answer.json()
    if path.startswith("/api"):
        assert body.keys() == {"error"}
        return str(body["error"])
    if path.startswith("/v1/messages"):
        assert (body.keys(), body["type"]) == ({"type", "error"}, "error")
        assert body["error"].keys() == {"type", "message"}
    else:
        assert (body.keys(), body["error"].keys()) == ({"error"}, {"message", "type", "param", "code"})
    message: str = body["error"]["message"]
    return message


def test_every_route_has_a_valid_body_here(url: str) -> None:
    assert VALID.keys() == ROUTES.keys() - ADAPTERS
    for path, body in VALID.items():
        assert post(url, body, path).status_code == 200, path


@pytest.mark.parametrize(("path", "case"), list(product(VALID, MALFORMED)))
def test_a_malformed_body_is_refused_and_the_next_one_served(url: str, path: str, case: str) -> None:
    answer = post(url, MALFORMED[case], path)
    assert answer.status_code == 400
    assert refusal(answer, path)
    assert post(url, VALID[path], path).status_code == 200


@pytest.mark.parametrize("path", VALID)
def test_a_wrong_type_is_refused_by_name(url: str, path: str) -> None:
    """Each field has a wrong type once."""
    route = ROUTES[path]
    for name, schema, _ in fields(route):
        if name == "metadata" and path == "/v1/responses":
            continue  # it has no effect, whatever it is
        wrong = next(value for kind, value in WRONG.items() if kind not in types(schema))
        answer = post(url, {**VALID[path], name: wrong}, path)
        assert answer.status_code == 400, (name, wrong)
        assert name in refusal(answer, path), (name, wrong)


def types(schema: dict[str, Any]) -> set[str]:
    """Returns the types that a field may have; a number may be an integer."""
    kinds = {kind for each in schema.get("anyOf", ()) for kind in types(each)}
    if "enum" in schema:
        kinds.add("string")
    kind = schema.get("type", "object" if "$ref" in schema else "null")
    return kinds | ({"integer", "number"} if kind == "number" else {kind})


@pytest.mark.parametrize("path", VALID)
def test_a_number_that_is_not_finite_is_refused(url: str, path: str) -> None:
    for text in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        body = json.dumps(VALID[path]).encode()[:-1] + b', "temperature": ' + text + b"}"
        answer = post(url, body, path)
        if text == b"1e999" and "temperature" not in {name for name, _, _ in fields(ROUTES[path])}:
            continue  # a number that JSON allows, in a field that the route does not have
        assert answer.status_code == 400, text
        assert refusal(answer, path)


@pytest.mark.parametrize("path", VALID)
def test_an_unknown_model_is_named(url: str, path: str) -> None:
    answer = post(url, {**VALID[path], "model": "other"}, path)
    assert answer.status_code == 404
    assert "other" in refusal(answer, path)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", [1_000_000]),
        ("/v1/completions", "prompt", [-1]),
        ("/v1/completions", "stop_token_ids", [1_000_000]),
        ("/v1/completions", "allowed_token_ids", [1_000_000]),
        ("/v1/completions", "logit_bias", {"1000000": 1}),
        ("/v1/chat/completions", "logit_bias", {"1000000": 1}),
        ("/detokenize", "tokens", [-1]),
        ("/detokenize", "tokens", [2**33]),
    ],
)
def test_an_id_beyond_the_vocabulary_is_refused(url: str, path: str, field: str, value: Any) -> None:
    answer = post(url, {**VALID[path], field: value}, path)
    assert answer.status_code == 400
    assert field in refusal(answer, path)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused(url: str, path: str, stream: bool) -> None:
    text = "once upon a time " * 5_000
    name = next(name for name in ("prompt", "messages", "input") if name in VALID[path])
    long = [{"role": "user", "content": text}] if name == "messages" else text
    answer = post(url, {**VALID[path], name: long, "stream": stream}, path)
    assert answer.status_code == 400
    assert "2048" in refusal(answer, path)


@pytest.mark.parametrize("path", VALID)
def test_a_body_of_100_mb_is_refused_before_it_is_read(url: str, path: str) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
    connection.putrequest("POST", path)
    connection.putheader("Authorization", f"Bearer {KEY}")
    connection.putheader("Content-Length", str(100_000_000))
    connection.endheaders(b"{")
    answer = connection.getresponse()
    assert answer.status == 413
    error = json.loads(answer.read())["error"]
    assert "bytes" in (error if path.startswith("/api") else error["message"])
    connection.close()
    assert post(url, VALID[path], path).status_code == 200
