"""A config.json says the same to Pagewire as to transformers, in whichever of its forms it is written."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagewire.services.executor.models.config_json import parse
from pagewire.services.executor.models.families.llama import LlamaConfig
from pagewire.services.executor.models.families.mistral import MistralConfig
from pagewire.services.executor.models.rope import rotary_embedding
from pagewire.shared.models.config_form import in_one_form
from pagewire.shared.models.model_folder import max_model_len
from pagewire.shared.settings.config import Settings

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 700.0},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ],
    ids=str,
)
def test_the_rotation_is_that_of_transformers(changes: dict[str, Any]) -> None:
    theirs = AutoConfig.for_model("llama", **SIZES, **deepcopy(changes)).rope_parameters
    ours = parse(LlamaConfig, in_one_form(SIZES | changes)).rope
    assert ours.rope_type == theirs["rope_type"]
    assert ours.rope_theta == theirs["rope_theta"]
    assert ours.factor == theirs["factor"]


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_angles_count_from_the_length_at_the_top(kind: str, name: str) -> None:
    """Its place there was Phi-3's alone, and the angles were those of a model trained with four times the context."""
    rope = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = SIZES | {name: rope, "rope_theta": 500.0, "original_max_position_embeddings": 64}
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **deepcopy(config)))
    ours = rotary_embedding(parse(LlamaConfig, in_one_form(config)).rope, 16)
    torch.testing.assert_close(ours.frequencies, theirs.inv_freq)


def test_the_context_counts_from_the_length_at_the_top() -> None:
    config = SIZES | {"rope_scaling": YARN, "original_max_position_embeddings": 64}
    assert max_model_len(Settings(), in_one_form(config)) == 256


def test_a_mistral_with_kinds_of_layers_is_a_ministral() -> None:
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]}
    assert in_one_form(config)["model_type"] == "ministral"
    assert in_one_form(config)["architectures"] == ["MinistralForCausalLM"]
    assert in_one_form(config | {"layer_types": None})["model_type"] == "mistral"


@pytest.mark.parametrize(
    ("stated", "window"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 24}, 24)]
)
def test_a_mistral_has_the_window_of_transformers(stated: dict[str, Any], window: int) -> None:
    assert (AutoConfig.for_model("mistral", **SIZES, **stated).sliding_window or 0) == window
    assert parse(MistralConfig, SIZES | stated).windows == (window,) * 2
