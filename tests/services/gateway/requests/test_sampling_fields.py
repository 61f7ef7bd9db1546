from typing import Any

import msgspec
import pytest

from pagewire.services.gateway.requests.sampling_fields import (
    read_fields,
    read_openai_fields,
    split_sampling,
    without_neutral,
)
from pagewire.services.gateway.requests.unknown_fields import HEADER, UnknownFields
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import StructuredOutputsParams

FIELDS = frozenset({"prompt", "best_of", "logprobs"})


def read(body: bytes) -> dict[str, Any]:
    return without_neutral(read_openai_fields(body, FIELDS, "request"), FIELDS)


@pytest.mark.parametrize(
    "field",
    [
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "flex"},
        {"parallel_tool_calls": False},
        {"tools": None},
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"logprobs": False},
        {"logit_bias": {}},
        {"logit_bias": None},
        {"modalities": ["text"]},
        {"kv_transfer_params": {}},
        {"vllm_xargs": {}},
        {"cache_prompt": True},
        {"whatever": None},
    ],
)
def test_neutral_fields_are_dropped(field: dict[str, Any]) -> None:
    assert read(msgspec.json.encode({"prompt": "x", **field})) == {"prompt": "x"}


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"modalities": ["audio"]},
    ],
)
def test_unsupported_fields_are_refused_by_name(field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet"):
        read(msgspec.json.encode({"prompt": "x", **field}))


def test_fields_of_the_route_are_kept_unchecked() -> None:
    assert read(b'{"best_of": 2, "logprobs": 0, "logit_bias": {"1": 1}}') == {
        "best_of": 2,
        "logprobs": 0,
        "logit_bias": {"1": 1},
    }


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": "\xff"}', b"[" * 50_000, b'{"a":' * 50_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body is not a request"):
        read(body)


def test_only_sampling_fields_of_the_body_are_returned() -> None:
    body = {"prompt": "x", "temperature": 1, "top_p": 1.0, "logit_bias": {"5": 1}, "stop": "end"}
    own, sampling = split_sampling(body, FIELDS)
    assert own == {"prompt": "x"}
    assert sampling == {"temperature": 1.0, "top_p": 1.0, "logit_bias": {5: 1.0}, "stop": "end"}


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}, "strict": True}},
            {"json": {"type": "null"}},
        ),
        (
            {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
                "triggers": ["<a>"],
            },
            {"structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}},
        ),
    ],
)
def test_a_response_format_is_a_structured_output(response_format: object, expected: dict[str, Any]) -> None:
    _, sampling = split_sampling({"response_format": response_format}, FIELDS)
    assert sampling == {"structured_outputs": StructuredOutputsParams(**expected)}


@pytest.mark.parametrize(
    "response_format", [1, {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}]
)
def test_a_malformed_response_format_is_refused(response_format: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format is malformed"):
        split_sampling({"response_format": response_format}, FIELDS)


def test_a_response_format_beside_structured_outputs_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format and structured_outputs"):
        split_sampling({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, FIELDS)


@pytest.mark.parametrize("body", [{"max_token": 1}, {"top_k": "many"}, {"stop": [1]}])
def test_a_wrong_field_is_named(body: dict[str, Any]) -> None:
    (name,) = body
    with pytest.raises(InvalidRequest, match=name):
        split_sampling(body, FIELDS)


def test_another_field_is_named_only_where_the_route_has_it() -> None:
    unknown = UnknownFields()
    assert read_fields(b'{"prompt": "x", "tokens": [1]}', {"tokens"}, "request", unknown) == {"tokens": [1]}
    assert unknown.headers() == [(HEADER, b"ignored unknown fields: prompt")]
    with pytest.raises(InvalidRequest, match="send messages instead"):
        read_fields(b'{"prompt": "x"}', {"messages"}, "request", unknown)
