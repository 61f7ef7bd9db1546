"""The decoder of a model that also takes images or sound, of which only text is asked."""

import json
from typing import Any

TEXT = "text_config"
"""The key of the decoder's configuration."""
PLAIN = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Kinds of decoders, and the plain kinds that do the same with text, where the three positions of a token are one."""
BIDIRECTIONAL = frozenset({"colpali", "paligemma", "shieldgemma2"})
"""Kinds whose prompts attend to all of themselves, or which generate no text."""
INHERITED = ("quantization_config", "dtype", "torch_dtype", "eos_token_id")
"""Fields that publishers also write beside the decoder's configuration."""


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the decoder alone, with all defaults; a config.json of a plain decoder as it is.

    What `transformers` has no decoder for is returned as it is too, and is refused by its name later.
    """
    if not isinstance(config.get(TEXT), dict) or str(config.get("model_type")) in BIDIRECTIONAL:
        return config
    # Takes a second to import, and only these models need it: publishers leave out what are the defaults of a family.
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
    inherited["tie_word_embeddings"] = getattr(whole, "tie_word_embeddings", text.get("tie_word_embeddings", False))
    return text | inherited | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], "model_type": kind}
