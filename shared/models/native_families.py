"""The architectures, as config.json names them, that Pagewire builds itself. All others are built by `transformers`."""

from collections.abc import Mapping
from typing import Any

NATIVE = frozenset(
    {
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM",
    }
)
"""The keys of `services.executor.models.registry.FAMILIES`, for processes that do not import torch."""


def is_native(config: Mapping[str, Any]) -> bool:
    """Returns whether Pagewire builds the model with this config.json.

    >>> is_native({"architectures": ["LlamaForCausalLM"]}), is_native({})
    (True, False)
    """
    return not NATIVE.isdisjoint(config.get("architectures") or ())
