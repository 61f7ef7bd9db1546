from typing import Any

import msgspec
import pytest

from pagewire.services.gateway.sampling_fields import read_body, split_sampling
from pagewire.shared.errors import InvalidRequest

KNOWN = frozenset({"prompt", "best_of", "logprobs"})


def read(body: bytes) -> dict[str, Any]:
    return read_body(body, KNOWN, "request")


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
def test_what_asks_for_nothing_is_not_there(field: dict[str, Any]) -> None:
    assert read(msgspec.json.encode({"prompt": "x", **field})) == {"prompt": "x"}


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"reasoning_effort": "high"},
        {"functions": [{}]},
        {"modalities": ["audio"]},
    ],
)
def test_what_asks_for_more_is_refused_by_name(field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet"):
        read(msgspec.json.encode({"prompt": "x", **field}))


def test_fields_of_the_route_are_for_the_route_to_judge() -> None:
    assert read(b'{"best_of": 2, "logprobs": 0, "logit_bias": {"1": 1}}') == {
        "best_of": 2,
        "logprobs": 0,
        "logit_bias": {"1": 1},
    }


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": "\xff"}', b"[" * 50_000, b'{"a":' * 50_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body is not a request"):
        read(body)


def test_the_sampling_fields_are_those_that_are_given() -> None:
    body = {"prompt": "x", "temperature": 1, "top_p": 1.0, "logit_bias": {"5": 1}, "stop": "end"}
    own, sampling = split_sampling(body, KNOWN)
    assert own == {"prompt": "x"}
    assert sampling == {"temperature": 1.0, "top_p": 1.0, "logit_bias": {5: 1.0}, "stop": "end"}


@pytest.mark.parametrize("body", [{"max_token": 1}, {"top_k": "many"}, {"stop": [1]}])
def test_a_wrong_field_is_named(body: dict[str, Any]) -> None:
    (name,) = body
    with pytest.raises(InvalidRequest, match=name):
        split_sampling(body, KNOWN)
