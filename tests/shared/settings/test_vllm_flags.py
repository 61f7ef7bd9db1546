"""vLLM's own flags, as its parser lists them: each is taken, or the command says what to do instead."""

import pytest

from pagewire import cli
from pagewire.commands import parser
from pagewire.shared.settings import flags
from pagewire.shared.settings.config import FIELDS
from pagewire.shared.settings.spelling import nearest
from pagewire.shared.settings.vllm_flags import ALIASES, IGNORED, NO_COUNTERPART, instead
from tools import vllm_names

VLLM = set(vllm_names.flags()) - {"help"}
COMMON = {
    "served-model-name",
    "host",
    "port",
    "model",
    "dtype",
    "seed",
    "api-key",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "block-size",
    "gpu-memory-utilization",
    "tensor-parallel-size",
    "data-parallel-size",
    "chat-template",
    "generation-config",
    "logprobs-mode",
    "max-logprobs",
    "ssl-keyfile",
    "ssl-certfile",
    "ssl-ca-certs",
    "allowed-origins",
    "kv-cache-dtype",
    "log-level",
}


def test_settings_with_vllms_meaning_have_vllms_name() -> None:
    assert VLLM & FIELDS.keys() >= COMMON


def test_few_flags_have_no_advice() -> None:
    unanswered = VLLM - FIELDS.keys() - ALIASES.keys() - IGNORED.keys()
    assert {flag for flag in unanswered if instead(flag) == NO_COUNTERPART} <= {
        "additional-config",
        "anthropic-disabled-thinking-effort",
        "aux-output-config",
        "cohere-format",
        "device-memory-utilization",
        "diffusion-config",
        "enable-fault-tolerance",
        "engram-config",
        "fail-on-environ-validation",
        "fault-tolerance-config",
        "fingerprint-mode",
        "fingerprint-value",
        "logits-processors",
        "return-sampling-mask",
        "use-fp64-gumbel",
        "watermark-config",
    }


def test_an_unsupported_flag_is_refused_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "bundled", "--tokenizer-mode", "x", "--trust-remote-code", "--lora-dtype=auto"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--tokenizer-mode: the tokenizer is that of --tokenizer" in error
    assert "--trust-remote-code: a checkpoint's own code could do anything on this machine, so it is never run" in error
    assert "--lora-dtype: adapters have the dtype of the model" in error


def test_flags_without_effect_are_accepted() -> None:
    namespace = parser.build_parser().parse_args(
        ["serve", *(f"--{flag}" for flag in IGNORED), "--no-enable-prefix-caching"]
    )
    assert not flags.read_settings(namespace).prefix_cache


def test_no_flag_of_vllm_is_taken_for_a_misspelt_one() -> None:
    ours = [*FIELDS, *ALIASES, *IGNORED]
    others = {flag for flag in VLLM - set(ours) if instead(flag) != NO_COUNTERPART}
    assert {flag: other for flag in others if (other := nearest(flag, ours, flags.MISSPELT)) is not None} == {}
