from typing import Any

import msgspec
import pytest

from pagewire.services.gateway.requests.completion_request import CompletionRequest, decode
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams

BENCH: dict[str, Any] = {
    "model": "m",
    "prompt": "x",
    "repetition_penalty": 1.0,
    "max_tokens": 32,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "ignore_eos": True,
}
"""A body of `vllm bench serve --backend openai`."""


def read(**fields: Any) -> CompletionRequest:
    request, _ = decode(msgspec.json.encode({"prompt": "x", **fields}))
    return request


def sampling(**fields: Any) -> SamplingParams:
    _, fields_of_sampling = decode(msgspec.json.encode({"prompt": "x", **fields}))
    return SamplingParams(**fields_of_sampling)


def test_a_request_of_vllms_benchmark_is_understood() -> None:
    assert read(**BENCH).stream_options.include_usage
    assert sampling(**BENCH) == SamplingParams(max_tokens=32, temperature=0.0, top_k=-1, ignore_eos=True)


def test_fields_that_are_absent_or_null_have_their_default() -> None:
    assert sampling() == SamplingParams()
    assert sampling(max_tokens=None, temperature=None, stop=None, n=None) == SamplingParams()
    assert SamplingParams().max_tokens == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("max_tokens", 7),
        ("min_tokens", 1),
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 3),
        ("min_p", 0.1),
        ("seed", 1),
        ("stop", ["a"]),
        ("stop", "a"),
        ("stop_token_ids", [1]),
        ("ignore_eos", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("logprobs", 1),
        ("prompt_logprobs", 1),
        ("length_penalty", 0.5),
    ],
)
def test_sampling_fields_are_passed_on(field: str, value: Any) -> None:
    """The tokenizer refuses the unsupported ones, and names the field, too."""
    assert getattr(sampling(**{field: value}), field) == value


def test_a_logit_bias_has_token_ids_as_strings() -> None:
    assert sampling(logit_bias={"50256": -100}).logit_bias == {50256: -100.0}


def test_a_beam_search_has_as_many_beams_as_completions() -> None:
    assert sampling(use_beam_search=True) == SamplingParams(beam_width=1)
    searched = sampling(use_beam_search=True, n=4, length_penalty=0.5)
    assert searched == SamplingParams(n=4, beam_width=4, length_penalty=0.5)
    assert sampling(use_beam_search=False, n=4) == SamplingParams(n=4)


@pytest.mark.parametrize(
    "neutral",
    [
        {"echo": False},
        {"suffix": None},
        {"response_format": {"type": "text"}},
        {"user": "me"},
        {"cache_salt": "mine"},
    ],
)
def test_an_unsupported_field_may_have_its_neutral_value(neutral: dict[str, Any]) -> None:
    assert sampling(**neutral) == SamplingParams()


def test_an_unsupported_field_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^suffix is not supported"):
        read(suffix="end")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b'{"prompt": "x", "guided_json": {}}', "guided_json"),
        (b'{"prompt": "x", "max_tokens": "many"}', "max_tokens"),
        (b'{"max_tokens": 1}', "prompt"),
        (b'{"prompt": {}}', "prompt"),
        (b"{", "completion request"),
        (b"", "completion request"),
        (b'{"prompt": "\xff"}', "completion request"),
    ],
)
def test_a_malformed_body_is_refused(body: bytes, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part):
        decode(body)


@pytest.mark.parametrize("prompt", ["x", [1, 2], ["a", "b"], [[1], [2]]])
def test_a_prompt_may_have_every_form(prompt: Any) -> None:
    assert read(prompt=prompt).prompt == prompt
