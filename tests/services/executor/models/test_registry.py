"""config.json is read strictly: what cannot be computed is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.services.executor.models.registry import FAMILIES, build_model, load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.models.native_families import NATIVE
from tests.support.checkpoints import checkpoint


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (read_config(checkpoint(name)) | changes).items() if value is not ...}


def refusal(name: str, **changes: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load_model(checkpoint(name), config_of(name, **changes), "auto")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_native_architectures_are_known_without_torch() -> None:
    assert FAMILIES.keys() == NATIVE


@pytest.mark.parametrize("named", [["GPT2ForSequenceClassification"], [], ...])
def test_an_unknown_architecture_is_answered_with_the_known_one(named: Any) -> None:
    message = refusal("llama", architectures=named)
    assert "LlamaForCausalLM" in message
    assert "GPT2ForSequenceClassification" in message or "none" in message


def test_a_mixture_with_fewer_experts_than_a_token_has_is_refused() -> None:
    assert "experts" in refusal("mixtral", num_experts_per_tok=5)


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    for name in ("llama", "gpt-oss"):  # by this project and by transformers
        config = config_of(name)
        first, again, other = (load_model(tmp_path, config, "auto", random=seed) for seed in (1, 1, 2))
        assert torch.equal(first.embedding, again.embedding)
        assert not torch.equal(first.embedding, other.embedding)
        assert first.embedding.std() > 0.01
        assert len({tuple(row) for row in first.embedding.tolist()}) == len(first.embedding), "tokens differ"


def test_a_model_without_a_family_cannot_be_simulated() -> None:
    with pytest.raises(ConfigurationError) as raised:
        build_model(config_of("llama", architectures=["BloomForCausalLM"]))
    assert all(name in str(raised.value) for name in FAMILIES)


@pytest.mark.parametrize("kind", ["longrope", "mrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_rope_scaling_is_refused_by_name(kind: str, key: str) -> None:
    assert kind in refusal("llama", rope_parameters=..., rope_scaling={key: kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"num_attention_heads": 5, "head_dim": None}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "odd"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, Any], word: str) -> None:
    assert word in refusal("llama", **changes)


def test_layer_types_must_name_every_layer() -> None:
    assert "layer_types" in refusal("qwen2-sliding", layer_types=["full_attention"])


def test_the_old_names_of_rope_and_dtype_mean_the_same() -> None:
    new = config_of("llama-llama3")
    scaling = dict(new["rope_parameters"])
    old = config_of(
        "llama-llama3",
        rope_parameters=...,
        dtype=...,
        torch_dtype="bfloat16",
        rope_theta=scaling.pop("rope_theta"),
        rope_scaling={"type": scaling.pop("rope_type")} | scaling,
    )
    expected = load_model(checkpoint("llama-llama3"), new, "bfloat16")
    model = load_model(checkpoint("llama-llama3"), old, "auto")
    assert model.embedding.dtype == torch.bfloat16
    buffers, result = dict(expected.named_buffers()), dict(model.named_buffers())
    assert buffers.keys() == result.keys()
    assert all(torch.equal(buffers[name], result[name]) for name in buffers)


def windows(name: str, config: dict[str, Any]) -> list[int]:
    return [layer.window for layer in load_model(checkpoint(name), config, "auto").spec.layers]


def test_windows_follow_the_configuration() -> None:
    sliding = config_of("qwen2-sliding")
    by_rule = sliding | {"layer_types": None}
    for config in (sliding, by_rule):
        assert windows("qwen2-sliding", config) == [0, 24]
    off = sliding | {"use_sliding_window": False, "layer_types": None}
    assert windows("qwen2-sliding", off) == [0, 0]
    assert windows("mistral", config_of("mistral")) == [24, 24]
    assert windows("mistral", config_of("mistral", sliding_window=None)) == [0, 0]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"vocab_size": 1 << 70}, "sizes that no model has"),
        ({"vocab_size": 1 << 60}, "sizes that no model has"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers of more than 1024"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], reason: str) -> None:
    config = read_config(checkpoint("llama")) | sizes
    with pytest.raises(ConfigurationError, match=reason):
        build_model(config)
