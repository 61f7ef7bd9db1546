import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.validation.sampling_checks import (
    MAX_BAD_WORDS,
    MAX_BEAM_STOPS,
    MAX_BEAMS,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    bad_word_ids,
    bad_word_texts,
    check,
    draw_seed,
    resolve,
    stop_strings,
    stop_tokens,
)
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages import unpack
from pagewire.shared.messages.client import SamplingParams, StructuredOutputsParams
from pagewire.shared.messages.work import Sampling
from pagewire.shared.sampling_parameters import MIN_TEMPERATURE, Record, record, unpack_record

VOCABULARY = 100
BUILT = {
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "beam_width",
    "length_penalty",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
}


def refused(**fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check(SamplingParams(**fields), VOCABULARY)
    return caught.value.message


def resolved(**fields: Any) -> Sampling:
    params = SamplingParams(**fields)
    check(params, VOCABULARY)
    return resolve(params, seed=7, max_tokens=16, eos=frozenset({3, 4}), vocab_size=VOCABULARY)


def column(name: str, **fields: Any) -> float:
    value: float = unpack_record(resolved(**fields).record)[name].item()
    return value


def test_every_field_is_built() -> None:
    assert {field.name for field in msgspec.structs.fields(SamplingParams)} == BUILT


def test_the_defaults_pass() -> None:
    check(SamplingParams(), VOCABULARY)


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [1]}, {"bad_words": ["x"]}, {"beam_width": 2}])
def test_fields_without_meaning_beside_a_grammar_are_refused(fields: dict[str, Any]) -> None:
    assert "structured_outputs" in refused(structured_outputs=StructuredOutputsParams(regex="a"), **fields)


def test_a_grammar_is_ended_by_eos_whatever_is_ignored() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), ignore_eos=True)
    work = resolve(params, seed=7, max_tokens=16, eos=frozenset({3}), vocab_size=VOCABULARY, grammar="start: /a/")
    assert (unpack(work.stop_ids), work.grammar) == ([3], "start: /a/")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.01),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("min_p", -math.inf),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", "x" * (MAX_STOP_LENGTH + 1)),
        ("stop", [str(number) for number in range(MAX_STOPS + 1)]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1, VOCABULARY]),
        ("stop_token_ids", [2**70]),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.nan),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {3: math.nan}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1, VOCABULARY]),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", ["a", "  "]),
        ("bad_words", ["x" * (MAX_STOP_LENGTH + 1)]),
        ("bad_words", [str(number) for number in range(MAX_BAD_WORDS + 1)]),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: object) -> None:
    message = refused(**{name: value})
    assert name in message
    assert len(message) < 200


def test_empty_edits_have_no_effect() -> None:
    assert resolved(logit_bias={}, bad_words=[], repetition_penalty=1.0) == resolved()


def test_more_edits_than_a_device_holds_are_refused() -> None:
    many = list(range(1025))
    with pytest.raises(InvalidRequest, match="logit_bias has 1025 tokens"):
        check(SamplingParams(logit_bias=dict.fromkeys(many, 1.0)), 10_000)
    with pytest.raises(InvalidRequest, match="allowed_token_ids has 1025 tokens"):
        check(SamplingParams(allowed_token_ids=many), 10_000)
    with pytest.raises(InvalidRequest, match="bad_words are 2 lists of 1200 tokens"):
        bad_word_ids([range(600), [], range(1, 601), []], 10_000)


def test_biases_are_clamped_and_allowed_tokens_counted_once() -> None:
    sampling = resolved(logit_bias={7: 250.0, 2: -1e9, 3: 0.5}, allowed_token_ids=[9, 4, 9])
    assert unpack(sampling.bias_ids) == [7, 2, 3]
    assert np.frombuffer(sampling.biases, "<f4").tolist() == [100.0, -100.0, 0.5]
    assert unpack(sampling.allowed_ids) == [4, 9]


def test_bad_words_are_banned_with_and_without_a_space() -> None:
    params = SamplingParams(bad_words=[" cat", "dog", "dog"])
    assert bad_word_texts(params) == ["cat", " cat", "dog", " dog"]
    encoded = [[5], [6], [7, 8], [7, 9], [4], [1, 4], [], [3]]
    words = bad_word_ids(encoded, 10)
    assert words == ((5,), (6,), (7, 8), (4,)), "a form counts with another first id and as many ids"
    assert bad_word_ids(encoded, 7) == ((5,), (6,), (4,)), "the model cannot generate ids beyond its vocabulary"
    packed = resolve(
        params, seed=7, max_tokens=16, eos=frozenset({3}), vocab_size=VOCABULARY, bad_words=((5,), (7, 8))
    ).bad_words
    assert unpack(packed) == [1, 5, 2, 7, 8]


@pytest.mark.parametrize(
    ("allowed", "fields", "words"),
    [([3, 4], {"min_tokens": 1}, ()), ([7, 8], {}, ((7,), (8,))), ([3, 7], {"min_tokens": 2}, ((7,), (9, 3)))],
)
def test_a_request_that_allows_no_token_is_refused(
    allowed: list[int], fields: dict[str, Any], words: tuple[tuple[int, ...], ...]
) -> None:
    params = SamplingParams(allowed_token_ids=allowed, **fields)
    with pytest.raises(InvalidRequest, match="allowed_token_ids are all banned"):
        resolve(params, seed=7, max_tokens=16, eos=frozenset({3, 4}), vocab_size=VOCABULARY, bad_words=words)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"beam_width": 2}])
def test_penalties_hold_for_greedy_requests_and_beams_too(fields: dict[str, Any]) -> None:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.5}
    assert resolved(**fields, **penalties).record == record(**penalties).tobytes()
    assert resolved(**penalties).record == record(temperature=1.0, **penalties).tobytes()


def test_a_beam_search_needs_enough_allowed_tokens() -> None:
    assert resolved(beam_width=2, allowed_token_ids=[1, 2, 5, 6]).candidates == 4
    with pytest.raises(InvalidRequest, match="exceed the 3 tokens there are"):
        resolved(beam_width=2, allowed_token_ids=[1, 2, 5])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_have_a_limit_and_zero_means_the_token_alone(name: str) -> None:
    most, more, none = ({name: count} for count in (4, 5, 0))
    check(msgspec.structs.replace(SamplingParams(), **most), VOCABULARY, max_logprobs=4)
    with pytest.raises(InvalidRequest, match=f"^{name} must be between 0 and 4, not 5"):
        check(msgspec.structs.replace(SamplingParams(), **more), VOCABULARY, max_logprobs=4)
    assert name in refused(**{name: -1})
    numbers = {field: getattr(resolved(**none), field) for field in ("logprobs", "prompt_logprobs")}
    assert numbers == {"logprobs": -1, "prompt_logprobs": -1, name: 0}


def test_too_many_stop_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids has 1025 tokens"):
        check(SamplingParams(stop_token_ids=list(range(MAX_STOP_TOKENS + 1))), 10_000)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 5},
        {"max_tokens": None, "min_tokens": 50},
        {"max_tokens": 3, "min_tokens": 3},
        {"temperature": 0.0},
        {"temperature": 2.0, "n": 2},
        {"top_p": 1.0, "top_k": -1, "min_p": 1.0},
        {"top_k": 10**9},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"stop": "end"},
        {"stop": [str(number) for number in range(MAX_STOPS)]},
        {"stop": "x" * MAX_STOP_LENGTH},
        {"stop_token_ids": [0, VOCABULARY - 1]},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.1},
        {"logit_bias": {0: -100.0, VOCABULARY - 1: 1e9}},
        {"allowed_token_ids": [0, VOCABULARY - 1, 0]},
    ],
)
def test_values_at_the_edge_pass(fields: dict[str, Any]) -> None:
    check(SamplingParams(**fields), VOCABULARY)


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_several_greedy_completions_are_refused(temperature: float) -> None:
    assert "n must be 1" in refused(n=2, temperature=temperature)


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    assert refused(min_tokens=5, max_tokens=4) == "min_tokens 5 exceeds max_tokens 4"


def test_greedy_needs_no_filters() -> None:
    assert resolved(temperature=0.0, top_p=0.5, top_k=5, min_p=0.1).record == record().tobytes()


def test_each_parameter_is_in_its_column() -> None:
    filters = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125}
    assert resolved(**filters).record == record(**filters).tobytes()


def test_a_temperature_that_would_overflow_is_raised() -> None:
    assert column("temperature", temperature=0.001) == MIN_TEMPERATURE
    assert column("temperature", temperature=0.7) == 0.7


@pytest.mark.parametrize(("given", "meant"), [(-1, 0), (0, 0), (5, 5), (VOCABULARY, 0), (2**70, 0)])
def test_top_k_of_everything_is_0(given: int, meant: int) -> None:
    assert column("top_k", top_k=given) == meant


def test_the_end_of_the_model_and_the_named_tokens_stop() -> None:
    assert unpack(resolved(stop_token_ids=[9, 3, 9]).stop_ids) == [3, 4, 9]


def test_ignored_ends_do_not_stop_but_named_tokens_do() -> None:
    assert unpack(resolved(stop_token_ids=[9], ignore_eos=True).stop_ids) == [9]
    assert unpack(resolved(ignore_eos=True).stop_ids) == []
    assert unpack(resolved(stop_token_ids=[4], ignore_eos=True).stop_ids) == [4]


def test_stops_are_kept_once_in_their_order() -> None:
    assert stop_strings(SamplingParams(stop=["b", "a", "b"])) == ("b", "a")
    assert stop_strings(SamplingParams(stop="b")) == ("b",)
    assert stop_strings(SamplingParams()) == ()
    assert stop_tokens(SamplingParams(stop_token_ids=[5, 1, 5])) == (5, 1)


@pytest.mark.parametrize(("given", "meant"), [(0, 0), (42, 42), (-2, 2**64 - 2), (2**64 - 1, 2**64 - 1)])
def test_a_given_seed_is_taken(given: int, meant: int) -> None:
    assert draw_seed(SamplingParams(seed=given), 5, b"digest", "r1") == meant


@pytest.mark.parametrize("absent", [None, -1])
def test_an_absent_seed_is_that_of_the_request_whenever_it_is_sent(absent: int | None) -> None:
    params = SamplingParams(seed=absent)
    drawn = {draw_seed(params, 0, body, f"r{number}") for number in range(10) for body in (b"a", b"b")}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**64 for seed in drawn)
    assert draw_seed(params, 0, b"a", "r0") == draw_seed(params, 0, b"a", "r0")


def test_a_deployment_seed_makes_absent_seeds_repeatable() -> None:
    params = SamplingParams()
    assert draw_seed(params, 1, b"a", "r1") == draw_seed(params, 1, b"a", "r2")
    assert len({draw_seed(params, seed, body, "r1") for seed in (1, 2, -1) for body in (b"a", b"b")}) == 6


@given(
    st.builds(
        SamplingParams,
        n=st.integers(-1, 4),
        max_tokens=st.none() | st.integers(-1, 40),
        min_tokens=st.integers(-1, 40),
        temperature=st.floats(),
        top_p=st.floats(),
        top_k=st.integers(-3, 200),
        min_p=st.floats(),
        seed=st.none() | st.integers(-(2**65), 2**65),
        stop=st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
        stop_token_ids=st.lists(st.integers(-2, VOCABULARY + 2), max_size=3),
        ignore_eos=st.booleans(),
    )
)
def test_parameters_that_pass_are_within_the_reach_of_a_device(params: SamplingParams) -> None:
    try:
        check(params, VOCABULARY)
    except InvalidRequest:
        return
    seed = draw_seed(params, 0, b"", "r1")
    resolved = resolve(params, seed=seed, max_tokens=params.max_tokens or 40, eos=frozenset({3}), vocab_size=VOCABULARY)
    columns: Record = unpack_record(resolved.record)
    assert columns["temperature"] == 0.0 or MIN_TEMPERATURE <= columns["temperature"] <= 2.0
    assert 0 < columns["top_p"] <= 1
    assert 0 <= columns["top_k"] < VOCABULARY
    assert 0 <= columns["min_p"] <= 1
    assert 0 <= resolved.seed < 2**64
    assert 0 <= resolved.min_tokens <= resolved.max_tokens
    assert all(0 <= token < VOCABULARY for token in unpack(resolved.stop_ids))


def test_a_beam_search_is_resolved_to_its_candidates() -> None:
    chosen = resolved(beam_width=4, n=2, length_penalty=0.5, stop_token_ids=[7, 3])
    assert (chosen.beam_width, chosen.length_penalty, chosen.candidates) == (4, 0.5, 4 + 3)
    assert unpack(chosen.stop_ids) == [3, 4, 7]
    assert chosen.record == record().tobytes()
    assert resolved(beam_width=1, ignore_eos=True).candidates == 1


def test_without_a_beam_search_nothing_reports_candidates() -> None:
    chosen = resolved()
    assert (chosen.beam_width, chosen.length_penalty, chosen.candidates) == (0, 1.0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "n": 3},
        {"temperature": 1.0},
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"seed": -1},
        {"stop": []},
        {"min_tokens": 0},
        {"n": 4},
        {"length_penalty": -2.0},
    ],
)
def test_neutral_values_may_stand_beside_a_beam_width(fields: dict[str, Any]) -> None:
    assert resolved(beam_width=4, **fields).beam_width == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("top_k", 5),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("seed", 3),
        ("stop", "end"),
        ("stop", ["end"]),
        ("best_of", 4),
        ("prompt_logprobs", 1),
        ("n", 5),
        ("length_penalty", math.nan),
        ("length_penalty", -math.inf),
    ],
)
def test_fields_without_meaning_in_a_beam_search_are_refused_by_name(name: str, value: object) -> None:
    assert name in refused(beam_width=4, **{name: value})


@pytest.mark.parametrize("width", [0, -1, MAX_BEAMS + 1])
def test_the_width_is_bounded(width: int) -> None:
    assert "beam_width" in refused(beam_width=width)


def test_a_length_penalty_needs_a_beam_search() -> None:
    assert "beam_width" in refused(length_penalty=2.0)


def test_stop_tokens_of_a_beam_search_are_bounded() -> None:
    params = SamplingParams(beam_width=2, stop_token_ids=list(range(MAX_BEAM_STOPS + 1)))
    check(params, VOCABULARY)
    with pytest.raises(InvalidRequest, match="stop tokens"):
        resolve(params, seed=7, max_tokens=16, eos=frozenset(), vocab_size=VOCABULARY)
    tiny = SamplingParams(beam_width=8)
    with pytest.raises(InvalidRequest, match="exceed the 8 tokens"):
        resolve(tiny, seed=7, max_tokens=16, eos=frozenset({3}), vocab_size=8)
