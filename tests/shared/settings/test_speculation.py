"""The settings of drafts: vLLM's keys, and errors that say what to do."""

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import speculation


def read(config: str = "", spec_type: str = "auto", device: str = "sim:zero") -> object:
    settings = Settings(speculative_config=config, spec_type=spec_type, device=device)  # type: ignore[arg-type]
    speculated = speculation(settings)
    return None if speculated is None else (speculated.method, speculated.tokens)


@pytest.mark.parametrize(
    ("config", "spec_type", "expected"),
    [
        ("", "auto", None),
        ("", "suffix", ("suffix", 16)),
        ("", "ngram", ("ngram", 8)),
        ('{"method": "ngram", "num_speculative_tokens": 4}', "auto", ("ngram", 4)),
        ('{"method": "ngram"}', "ngram", ("ngram", 8)),
        ('{"prompt_lookup_max": 4}', "auto", ("ngram", 8)),
        ('{"suffix_decoding_max_spec_factor": 2.0}', "auto", ("suffix", 16)),
        ('{"num_speculative_tokens": 3}', "ngram", ("ngram", 3)),
        ('{"method": "none"}', "auto", None),
        ('{"model": "small"}', "auto", ("draft_model", 8)),
        ('{"model": "small", "num_speculative_tokens": 5}', "draft_model", ("draft_model", 5)),
        ("", "none", None),
    ],
)
def test_the_method_is_the_one_that_is_named(config: str, spec_type: str, expected: object) -> None:
    assert read(config, spec_type) == expected


@pytest.mark.parametrize(
    ("config", "spec_type", "reason"),
    [
        ('{"method": "ngram"}', "suffix", "set one of them"),
        ('{"method": "eagle3", "num_speculative_tokens": 3}', "auto", "by eagle3 is not supported yet"),
        ("", "mtp", "by mtp is not supported yet"),
        ('{"model": "small"}', "suffix", "needs the key model"),
        ("", "draft_model", "needs the key model"),
        ('{"model": "small", "draft_tensor_parallel_size": 2}', "auto", "draft_tensor_parallel_size"),
        ('{"method": "sufix"}', "auto", "did you mean suffix"),
        ('{"num_speculative_tokens": 0}', "auto", "num_speculative_tokens"),
        ('{"num_speculative_token": 4}', "auto", "num_speculative_token"),
        ('{"suffix_decoding_max_cached_requests": -1}', "auto", "suffix_decoding_max_cached_requests"),
        ('{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}', "auto", "prompt_lookup_min"),
        ("ngram", "auto", "speculative-config"),
        ('{"method": "suffix", "prompt_lookup_max": 3}', "auto", "prompt_lookup_max, a key of method ngram"),
        (
            '{"prompt_lookup_max": 3, "suffix_decoding_max_tree_depth": 8}',
            "auto",
            "suffix_decoding_max_tree_depth, a key",
        ),
        ('{"quantization": "int8"}', "auto", "needs the key model"),
        ('{"max_model_len": 4096}', "suffix", "max_model_len, a key of method draft_model"),
        ('{"suffix_decoding_max_spec_factor": 1e308}', "auto", "suffix_decoding_max_spec_factor"),
    ],
)
def test_an_impossible_configuration_is_refused_by_name(config: str, spec_type: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        read(config, spec_type)


@pytest.mark.parametrize(
    ("config", "lookup"),
    [
        ("{}", (5, 5)),
        ('{"prompt_lookup_max": 3}', (3, 3)),
        ('{"prompt_lookup_min": 2}', (2, 2)),
        ('{"prompt_lookup_min": 2, "prompt_lookup_max": 4}', (2, 4)),
    ],
)
def test_the_bounds_of_ngrams_follow_vllm(config: str, lookup: tuple[int, int]) -> None:
    speculated = speculation(Settings(speculative_config=config, spec_type="ngram"))
    assert speculated is not None
    assert speculated.lookup == lookup
