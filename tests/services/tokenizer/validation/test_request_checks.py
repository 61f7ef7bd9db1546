from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.chat.chat_template import Conversation
from pagewire.services.tokenizer.validation.request_checks import (
    HEADROOM,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    MAX_TIMEOUT_MS,
    RESULT_BYTES,
    ChatPrompt,
    RequestLimits,
    TextPrompts,
    TokenPrompts,
    check_ids,
    check_tokens,
    prompts_of,
    tokens_to_generate,
    validate,
)
from pagewire.shared.errors import ContextLength, InvalidRequest, PayloadTooLarge
from pagewire.shared.messages.client import ChatMessage, GenerateRequest, SamplingParams


def refused(**fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validate(GenerateRequest(prompt="x", **fields), 100)
    return caught.value.message


def test_a_valid_request_yields_its_prompts() -> None:
    assert validate(GenerateRequest(prompt="x"), 100) == TextPrompts(["x"])
    assert validate(GenerateRequest(prompt=[1]), 100) == TokenPrompts([[1]])


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
    assert "logprobs" in refused(sampling=SamplingParams(logprobs=21))


def test_the_prompt_is_checked_too() -> None:
    with pytest.raises(InvalidRequest, match="exactly one"):
        validate(GenerateRequest(), 100)


TURN = ChatMessage("user", "hello")


def refused_prompt(request: GenerateRequest) -> str:
    with pytest.raises(InvalidRequest) as caught:
        prompts_of(request)
    return caught.value.message


def test_a_text_is_one_prompt() -> None:
    assert prompts_of(GenerateRequest(prompt="hello")) == TextPrompts(["hello"])


def test_a_list_of_ids_is_one_prompt() -> None:
    assert prompts_of(GenerateRequest(prompt=[1, 2, 3])) == TokenPrompts([[1, 2, 3]])


def test_several_texts_are_several_prompts() -> None:
    assert prompts_of(GenerateRequest(prompt=["a", "b"])) == TextPrompts(["a", "b"])
    assert prompts_of(GenerateRequest(prompt=["a"])) == TextPrompts(["a"])


def test_several_lists_of_ids_are_several_prompts() -> None:
    assert prompts_of(GenerateRequest(prompt=[[1], [2, 3]])) == TokenPrompts([[1], [2, 3]])


def test_a_conversation_is_one_prompt() -> None:
    assert prompts_of(GenerateRequest(messages=[TURN])) == ChatPrompt(
        Conversation([{"role": "user", "content": "hello"}])
    )


@pytest.mark.parametrize(
    "request_",
    [GenerateRequest(), GenerateRequest(prompt="x", messages=[TURN]), GenerateRequest(prompt="", messages=[])],
)
def test_prompt_and_messages_exclude_each_other(request_: GenerateRequest) -> None:
    assert refused_prompt(request_) == "give exactly one of prompt and messages"


def test_an_empty_prompt_or_conversation_is_refused() -> None:
    assert "messages is empty" in refused_prompt(GenerateRequest(messages=[]))
    assert "prompt is empty" in refused_prompt(GenerateRequest(prompt=[]))


@pytest.mark.parametrize("prompt", [["a", 1], [1, "a"], ["a", [1]], [[1], 2], [[1], "a", 3]])
def test_mixed_kinds_are_refused(prompt: list[int | str | list[int]]) -> None:
    assert "several kinds" in refused_prompt(GenerateRequest(prompt=prompt))


def test_the_number_of_prompts_is_bounded() -> None:
    assert prompts_of(GenerateRequest(prompt=["x"] * MAX_PROMPTS)) == TextPrompts(["x"] * MAX_PROMPTS)
    assert str(MAX_PROMPTS + 1) in refused_prompt(GenerateRequest(prompt=["x"] * (MAX_PROMPTS + 1)))
    assert str(MAX_PROMPTS + 1) in refused_prompt(GenerateRequest(prompt=[[1]] * (MAX_PROMPTS + 1)))


def test_a_long_list_of_ids_is_one_prompt() -> None:
    assert prompts_of(GenerateRequest(prompt=[1] * 10_000)) == TokenPrompts([[1] * 10_000])


@pytest.mark.parametrize("ids", [[-1], [10], [0, 9, 10], [2**70], [5, -(2**70)]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt 1 has token .* outside the vocabulary of 10 tokens"):
        check_ids([[0], ids], 10)


def test_an_empty_prompt_in_a_batch_is_named() -> None:
    with pytest.raises(InvalidRequest, match="prompt 2 is empty"):
        check_ids([[1], [2], []], 10)


@given(st.lists(st.lists(st.integers(-5, 15)), max_size=5))
def test_ids_that_pass_are_inside_the_vocabulary(prompts: list[list[int]]) -> None:
    good = all(ids and all(0 <= token < 10 for token in ids) for ids in prompts)
    if good:
        check_ids(prompts, 10)
    else:
        with pytest.raises(InvalidRequest):
            check_ids(prompts, 10)


LIMITS = RequestLimits(max_model_len=100, vocab_size=1000, max_payload=1 << 20)


def test_a_request_may_limit_its_own_tokens() -> None:
    assert tokens_to_generate([10, 20], SamplingParams(max_tokens=5), LIMITS) == 5


def test_without_a_number_the_longest_prompt_leaves_the_rest() -> None:
    assert tokens_to_generate([10, 20], SamplingParams(max_tokens=None), LIMITS) == 80


def test_prompt_and_tokens_may_fill_the_context_exactly() -> None:
    assert tokens_to_generate([99], SamplingParams(max_tokens=1), LIMITS) == 1
    assert tokens_to_generate([60], SamplingParams(max_tokens=40), LIMITS) == 40
    assert tokens_to_generate([99], SamplingParams(max_tokens=None), LIMITS) == 1
    assert tokens_to_generate([60], SamplingParams(max_tokens=5000), LIMITS, clamp=True) == 40
    assert tokens_to_generate([60], SamplingParams(max_tokens=5), LIMITS, clamp=True) == 5


@pytest.mark.parametrize("length", [100, 101, 10_000])
def test_a_prompt_that_fills_the_context_is_refused(length: int) -> None:
    with pytest.raises(ContextLength, match=f"{length} tokens and the context 100"):
        check_tokens([[1], [1] * length], LIMITS)


def test_tokens_beyond_the_context_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(ContextLength, match="at most 39"):
        tokens_to_generate([5, 61], SamplingParams(max_tokens=40), LIMITS)


def test_a_minimum_beyond_the_context_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens 21 exceeds the 20 tokens"):
        tokens_to_generate([80], SamplingParams(max_tokens=None, min_tokens=21), LIMITS)


def test_the_number_of_completions_is_bounded() -> None:
    assert tokens_to_generate([1] * 4, SamplingParams(n=MAX_SEQUENCES // 4), LIMITS) == 16
    with pytest.raises(InvalidRequest, match=f"at most {MAX_SEQUENCES}"):
        tokens_to_generate([1] * 4, SamplingParams(n=MAX_SEQUENCES // 4 + 1), LIMITS)


def test_beams_count_like_completions_but_are_no_part_of_the_result() -> None:
    limits = RequestLimits(max_model_len=100_000, vocab_size=1000, max_payload=HEADROOM + RESULT_BYTES * 1000)
    assert tokens_to_generate([10], SamplingParams(max_tokens=500, n=2, beam_width=16), limits) == 500
    assert tokens_to_generate([1] * 16, SamplingParams(beam_width=MAX_SEQUENCES // 16), LIMITS) == 16
    with pytest.raises(InvalidRequest, match=f"at most {MAX_SEQUENCES}"):
        tokens_to_generate([1] * 17, SamplingParams(beam_width=MAX_SEQUENCES // 16), LIMITS)


def test_a_result_too_large_for_a_message_is_refused_with_its_limit() -> None:
    limits = RequestLimits(max_model_len=100_000, vocab_size=1000, max_payload=HEADROOM + RESULT_BYTES * 1000)
    assert tokens_to_generate([10], SamplingParams(max_tokens=1000), limits) == 1000
    assert tokens_to_generate([10], SamplingParams(max_tokens=500, n=2), limits) == 500
    with pytest.raises(PayloadTooLarge, match="max_tokens to at most 500"):
        tokens_to_generate([10], SamplingParams(max_tokens=501, n=2), limits)
    with pytest.raises(PayloadTooLarge):
        tokens_to_generate([10], SamplingParams(max_tokens=None), limits)


def test_work_that_could_not_fit_is_refused() -> None:
    limits = RequestLimits(max_model_len=100_000, vocab_size=1000, max_payload=HEADROOM + 4000)
    assert tokens_to_generate([500, 500], SamplingParams(max_tokens=1), limits) == 1
    with pytest.raises(PayloadTooLarge, match="fewer or shorter prompts"):
        tokens_to_generate([500, 501], SamplingParams(max_tokens=1), limits)


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    st.integers(1, 4),
    st.none() | st.integers(1, 3000),
    st.integers(HEADROOM, HEADROOM + 100_000),
)
def test_a_request_that_passes_fits_everywhere(
    lengths: list[int], n: int, max_tokens: int | None, max_payload: int
) -> None:
    limits = RequestLimits(max_model_len=2048, vocab_size=1000, max_payload=max_payload)
    try:
        check_tokens([[0] * length for length in lengths], limits)
        tokens = tokens_to_generate(lengths, SamplingParams(n=n, max_tokens=max_tokens), limits)
    except (InvalidRequest, ContextLength, PayloadTooLarge):
        return
    assert tokens >= 1
    assert max(lengths) + tokens <= limits.max_model_len
    assert 4 * sum(lengths) < max_payload
    assert RESULT_BYTES * len(lengths) * n * tokens < max_payload
