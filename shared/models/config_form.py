"""A config.json in the form that current families are published in: each setting in one place, under one name."""

from typing import Any

TRAINED_LENGTH = "original_max_position_embeddings"
"""Key of the length of context, in positions, that a model was trained with before its positions were stretched."""
STRETCHED = frozenset({"llama3", "yarn", "longrope"})
"""Types of RoPE whose angles depend on that length. The one at the top of config.json wins."""


def in_one_form(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json in which each setting has one place, as `transformers` understands it.

    >>> in_one_form({"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 500.0}})
    {'rope_scaling': {'rope_type': 'linear', 'factor': 4.0}}
    """
    config = dict(config)
    if config.get("model_type") == "mistral" and config.get("layer_types"):
        config |= {"model_type": "ministral", "architectures": ["MinistralForCausalLM"]}
    if isinstance(config.get("rope_scaling"), dict) and config["rope_scaling"]:
        config.pop("rope_parameters", None)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if TRAINED_LENGTH in config and isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in STRETCHED:
            config[name] = rope | {TRAINED_LENGTH: config[TRAINED_LENGTH]}
    return config
