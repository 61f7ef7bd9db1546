from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pagewire.services.tokenizer.validation import generation_config
from pagewire.services.tokenizer.validation.generation_config import GenerationDefaults, generation_defaults
from pagewire.shared.messages.client import SamplingParams
from pagewire.shared.messages.open import Encoding

OWN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.0}


def completed(defaults: GenerationDefaults, encoding: Encoding = Encoding.JSON, **given: Any) -> SamplingParams:
    encode = msgspec.json.encode if encoding == Encoding.JSON else msgspec.msgpack.encode
    return defaults.complete(msgspec.convert(given, SamplingParams), encode({"sampling": given}), encoding)


@pytest.mark.parametrize("encoding", [Encoding.JSON, Encoding.MSGPACK])
def test_defaults_fill_in_omitted_parameters_alone(encoding: Encoding) -> None:
    defaults = generation_defaults(OWN, 100)
    assert completed(defaults, encoding) == SamplingParams(temperature=0.7, top_p=0.8, top_k=20)
    assert completed(defaults, encoding, top_p=1.0, seed=3) == SamplingParams(temperature=0.7, top_k=20, seed=3)
    assert completed(defaults, encoding, temperature=0.0) == SamplingParams(temperature=0.0, top_p=0.8, top_k=20)


def test_a_request_without_sampling_is_filled_in() -> None:
    defaults = generation_defaults(OWN, 100)
    params = defaults.complete(SamplingParams(), b'{"prompt": "x"}', Encoding.JSON)
    assert params == SamplingParams(temperature=0.7, top_p=0.8, top_k=20)


def test_a_beam_search_is_left_as_it_is() -> None:
    assert completed(generation_defaults(OWN, 100), beam_width=2) == SamplingParams(beam_width=2)


def test_without_need_the_request_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(generation_config, "decode_request", refuse)
    assert completed(generation_defaults({}, 100)) == SamplingParams()
    assert completed(generation_defaults({"temperature": 0.7}, 100), temperature=0.5) == SamplingParams(temperature=0.5)


def test_max_new_tokens_is_for_requests_that_name_no_number() -> None:
    defaults = generation_defaults({"max_new_tokens": 99}, 100)
    assert defaults.max_new_tokens == 99
    assert completed(defaults).max_tokens is None
    assert completed(defaults, max_tokens=16).max_tokens == 16
    assert generation_defaults({}, 100).max_new_tokens is None


def test_unusable_defaults_are_named_in_one_warning() -> None:
    with capture_logs() as logs:
        config = {
            "temperature": 7,
            "top_k": "many",
            "min_p": 0.1,
            "eos_token_id": 0,
            "top_p": None,
            "max_new_tokens": 0,
        }
        defaults = generation_defaults(config, 100)
    assert defaults == GenerationDefaults({"min_p": 0.1})
    (warning,) = logs
    assert {"temperature", "top_k", "max_new_tokens"} <= warning.keys()
    assert "top_p" not in warning


def test_a_model_that_says_nothing_brings_no_warning() -> None:
    with capture_logs() as logs:
        assert generation_defaults({"eos_token_id": 0, "do_sample": False, **OWN}, 100).fields == OWN
    assert logs == []
