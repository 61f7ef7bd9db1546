from typing import Any

import pytest

from pagewire.services.tokenizer.prompts import Ids, Texts
from pagewire.services.tokenizer.validate import MAX_TIMEOUT_MS, validate
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import GenerateRequest, SamplingParams


def refused(**fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validate(GenerateRequest(prompt="x", **fields), 100)
    return caught.value.message


def test_a_request_is_what_it_asks_for() -> None:
    assert validate(GenerateRequest(prompt="x"), 100) == Texts(["x"])
    assert validate(GenerateRequest(prompt=[1]), 100) == Ids([[1]])


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a*", ">", "x" * 65, "ä", "a\n", "../x"])
def test_a_request_id_that_is_no_token_is_refused(name: str) -> None:
    assert "request_id" in refused(request_id=name)


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 64])
def test_a_request_id_that_is_a_token_passes(name: str) -> None:
    validate(GenerateRequest(prompt="x", request_id=name), 100)


@pytest.mark.parametrize("timeout", [0, -1, MAX_TIMEOUT_MS + 1, 2**70])
def test_a_deadline_out_of_range_is_refused(timeout: int) -> None:
    assert "timeout_ms" in refused(timeout_ms=timeout)


def test_a_salt_of_any_length_is_refused_with_the_limit() -> None:
    assert "cache_salt must have at most 256" in refused(cache_salt="s" * 257)
    validate(GenerateRequest(prompt="x", cache_salt="s" * 256), 100)


def test_a_user_of_any_length_is_refused_with_the_limit() -> None:
    assert "256" in refused(user="u" * 257)
    validate(GenerateRequest(prompt="x", user="u" * 256), 100)


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 2**70])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    assert "priority" in refused(priority=priority)


def test_values_at_the_edge_pass() -> None:
    validate(GenerateRequest(prompt="x", timeout_ms=1, priority=2**31 - 1), 100)
    validate(GenerateRequest(prompt="x", timeout_ms=MAX_TIMEOUT_MS, priority=-(2**31)), 100)


def test_sampling_is_checked_too() -> None:
    assert "temperature" in refused(sampling=SamplingParams(temperature=3))
    assert "logprobs" in refused(sampling=SamplingParams(logprobs=1))


def test_the_prompt_is_checked_too() -> None:
    with pytest.raises(InvalidRequest, match="exactly one"):
        validate(GenerateRequest(), 100)
