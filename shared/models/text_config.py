"""The configuration of the text decoder in a model that also takes images or sound."""

import json
from typing import Any

TEXT = "text_config"
"""Key of the decoder's configuration."""
PLAIN = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Plain kind by the kind of a decoder that computes the same from text, where a token's three positions are equal."""
BIDIRECTIONAL = frozenset({"colpali", "paligemma", "shieldgemma2"})
"""Kinds of models that read prompts in both directions, or generate no text."""
INHERITED = ("quantization_config", "dtype", "torch_dtype", "eos_token_id")
"""Fields that publishers also write outside the decoder's configuration."""


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the decoder alone, with all defaults; a config.json of a plain decoder as it is.

    A model without a decoder in `transformers` keeps its config.json, too, and is refused by its name later.
    """
    if not isinstance(config.get(TEXT), dict) or str(config.get("model_type")) in BIDIRECTIONAL:
        return config
    # The import takes a second, and only these models need the defaults of their family, which publishers leave out.
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        whole = AutoConfig.for_model(**config)
        text: dict[str, Any] = json.loads(whole.get_text_config(decoder=True).to_json_string(use_diff=False))
    except Exception:  # noqa: BLE001 - checks of any family, which raise what they like
        return config
    kind = PLAIN.get(text["model_type"], text["model_type"])
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return config
    rope = text.get("rope_parameters")
    if kind != text["model_type"] and isinstance(rope, dict):
        text["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    inherited = {key: config[key] for key in INHERITED if config.get(key) is not None}
    usual = getattr(whole, "tie_word_embeddings", text.get("tie_word_embeddings", False))
    tied = config.get("tie_word_embeddings", config[TEXT].get("tie_word_embeddings"))
    inherited["tie_word_embeddings"] = usual if tied is None else tied
    return text | inherited | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], "model_type": kind}
