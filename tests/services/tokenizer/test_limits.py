import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.limits import (
    HEADROOM,
    MAX_SEQUENCES,
    RESULT_BYTES,
    Limits,
    tokens_to_generate,
)
from pagewire.shared.errors import ContextLength, InvalidRequest, PayloadTooLarge
from pagewire.shared.messages.client import SamplingParams

LIMITS = Limits(max_model_len=100, vocab_size=1000, max_payload=1 << 20)


def test_the_requests_own_number() -> None:
    assert tokens_to_generate([10, 20], SamplingParams(max_tokens=5), LIMITS) == 5


def test_without_a_number_the_longest_prompt_leaves_the_rest() -> None:
    assert tokens_to_generate([10, 20], SamplingParams(max_tokens=None), LIMITS) == 80


def test_prompt_and_tokens_may_fill_the_context_exactly() -> None:
    assert tokens_to_generate([99], SamplingParams(max_tokens=1), LIMITS) == 1
    assert tokens_to_generate([60], SamplingParams(max_tokens=40), LIMITS) == 40
    assert tokens_to_generate([99], SamplingParams(max_tokens=None), LIMITS) == 1


@pytest.mark.parametrize("max_tokens", [1, 16, None])
@pytest.mark.parametrize("length", [100, 101, 10_000])
def test_a_prompt_that_fills_the_context_is_refused(length: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextLength, match=f"{length} tokens and the context 100"):
        tokens_to_generate([1, length], SamplingParams(max_tokens=max_tokens), LIMITS)


def test_tokens_beyond_the_context_are_refused_with_what_fits() -> None:
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
    limits = Limits(max_model_len=100_000, vocab_size=1000, max_payload=HEADROOM + RESULT_BYTES * 1000)
    assert tokens_to_generate([10], SamplingParams(max_tokens=500, n=2, beam_width=16), limits) == 500
    assert tokens_to_generate([1] * 16, SamplingParams(beam_width=MAX_SEQUENCES // 16), LIMITS) == 16
    with pytest.raises(InvalidRequest, match=f"at most {MAX_SEQUENCES}"):
        tokens_to_generate([1] * 17, SamplingParams(beam_width=MAX_SEQUENCES // 16), LIMITS)


def test_a_result_that_could_not_fit_is_refused_with_what_does() -> None:
    limits = Limits(max_model_len=100_000, vocab_size=1000, max_payload=HEADROOM + RESULT_BYTES * 1000)
    assert tokens_to_generate([10], SamplingParams(max_tokens=1000), limits) == 1000
    assert tokens_to_generate([10], SamplingParams(max_tokens=500, n=2), limits) == 500
    with pytest.raises(PayloadTooLarge, match="max_tokens to at most 500"):
        tokens_to_generate([10], SamplingParams(max_tokens=501, n=2), limits)
    with pytest.raises(PayloadTooLarge):
        tokens_to_generate([10], SamplingParams(max_tokens=None), limits)


def test_work_that_could_not_fit_is_refused() -> None:
    limits = Limits(max_model_len=100_000, vocab_size=1000, max_payload=HEADROOM + 4000)
    assert tokens_to_generate([500, 500], SamplingParams(max_tokens=1), limits) == 1
    with pytest.raises(PayloadTooLarge, match="fewer or shorter prompts"):
        tokens_to_generate([500, 501], SamplingParams(max_tokens=1), limits)


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    st.integers(1, 4),
    st.none() | st.integers(1, 3000),
    st.integers(HEADROOM, HEADROOM + 100_000),
)
def test_what_passes_fits_everywhere(lengths: list[int], n: int, max_tokens: int | None, max_payload: int) -> None:
    limits = Limits(max_model_len=2048, vocab_size=1000, max_payload=max_payload)
    try:
        tokens = tokens_to_generate(lengths, SamplingParams(n=n, max_tokens=max_tokens), limits)
    except (InvalidRequest, ContextLength, PayloadTooLarge):
        return
    assert tokens >= 1
    assert max(lengths) + tokens <= limits.max_model_len
    assert 4 * sum(lengths) < max_payload
    assert RESULT_BYTES * len(lengths) * n * tokens < max_payload
