"""A family that cannot be right is refused in one line, before a weight is read."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagewire.services.executor.models.registry import load_model
from pagewire.shared.errors import ConfigurationError
from tests.families.tiny import tiny_config


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = AutoConfig.for_model(family).to_dict()
    return config | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]} | changes


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load_model(Path("/nowhere"), config, "float32")
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("falcon_h1", "other state"),
        ("inkling_text", "other state"),
        ("mamba", "other state"),
        ("qwen3_next", "other state"),
        ("glm_moe_dsa", "indexed_attention"),
        ("gemma3", "vision_config"),
        ("bart", "encoder"),
    ],
)
def test_a_family_that_keeps_more_than_keys_and_values_is_refused(family: str, words: str) -> None:
    message = refusal(config_of(family))
    assert family in message
    assert words in message


@pytest.mark.parametrize(
    ("family", "words"), [("diffllama", "more than once"), ("bloom", "positions"), ("falcon", "0 times")]
)
def test_a_family_that_does_not_attend_once_per_layer_is_refused(family: str, words: str) -> None:
    config = tiny_config(family).to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}
    assert words in refusal(config)


def test_code_that_a_model_brings_along_is_not_run() -> None:
    config = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": {"AutoModel": "mine.MineModel"}}
    assert "MineForCausalLM brings code of its own, which is not run" in refusal(config)


def test_a_model_that_generates_no_text_is_refused() -> None:
    assert "generates no text" in refusal({"model_type": "vit", "architectures": ["ViTForImageClassification"]})
    assert "GPT2LMHeadModel alone" in refusal(config_of("gpt2") | {"architectures": ["GPT2ForSequenceClassification"]})
