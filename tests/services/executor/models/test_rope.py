"""Rotary position embedding, against transformers."""

from typing import Any

import pytest
import torch
from transformers import Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagewire.services.executor.models.rope import read_rope, rotary_embedding
from pagewire.shared.errors import ConfigurationError

HEAD_DIM, THETA, CONTEXT = 64, 1_000_000.0, 32768
ORIGINAL = "original_max_position_embeddings"
QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
"""Addition to config.json for long texts, from Qwen2.5's model card."""


@pytest.mark.parametrize(
    "scaling",
    [
        QWEN,
        {"type": "yarn", "factor": 4.0},
        QWEN | {"truncate": False},
        QWEN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        QWEN | {"mscale": 0.707, "mscale_all_dim": 0.5},
        QWEN | {"mscale": 0.707},
        QWEN | {"attention_factor": 0.9},
        QWEN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
        QWEN | {"original_max_position_embeddings": 1024, "beta_fast": 1, "beta_slow": 1, "truncate": False},
    ],
)
def test_yarn_equals_transformers(scaling: dict[str, Any]) -> None:
    config = Qwen2Config(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters=scaling | {"rope_type": "yarn", "rope_theta": THETA},
    )
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rotary = rotary_embedding(read_rope(scaling, THETA, CONTEXT), HEAD_DIM)
    torch.testing.assert_close(rotary.frequencies, expected, rtol=1e-6, atol=0)
    assert rotary.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.25},
        {"rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(32)], "long_factor": [9.0] * 32},
        {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [9.0] * 32, "factor": 16.0},
        {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [9.0] * 32, "attention_factor": 1.2},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_every_other_rope_type_equals_transformers(scaling: dict[str, Any]) -> None:
    original = {} if scaling["rope_type"] in {"linear", "dynamic", "proportional"} else {ORIGINAL: 4096}
    config = Qwen2Config(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters=scaling | original | {"rope_theta": THETA},
    )
    expected, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rotary = rotary_embedding(read_rope(scaling | original, THETA, CONTEXT), HEAD_DIM)
    torch.testing.assert_close(rotary.frequencies, expected, rtol=2e-6, atol=0)
    assert rotary.scale == pytest.approx(scale, rel=1e-12)


def test_a_family_that_rotates_whole_heads_refuses_a_part() -> None:
    with pytest.raises(ConfigurationError, match="whole heads"):
        read_rope({"partial_rotary_factor": 0.5}, THETA, CONTEXT)
    assert rotary_embedding(read_rope({"partial_rotary_factor": 0.5}, THETA, CONTEXT, partial=None), 64).rotated == 32


def test_without_a_factor_yarn_scales_by_the_ratio_of_the_contexts() -> None:
    assert read_rope({"type": "yarn", "original_max_position_embeddings": 1024}, THETA, 4096).factor == 4.0
