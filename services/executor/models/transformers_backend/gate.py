"""Refuses what cannot be right on a paged KV cache, before a weight is read."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pagewire.shared.errors import ConfigurationError

KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Kinds of layers whose only state is keys and values."""
_STATE = re.compile(r"\b(conv_states?|recurrent_states?|ssm_states?|cache_params|update_\w*_state)\b")


def check_config(config: PretrainedConfig) -> None:
    """Refuses what the configuration shows.

    Raises:
        ConfigurationError: the model is no decoder of text whose only state is keys and values.
    """
    if config.is_encoder_decoder:
        raise ConfigurationError("it has an encoder")
    parts = sorted(name for name in config.sub_configs if getattr(config, name, None) is not None)
    if parts and not hasattr(config, "num_hidden_layers"):
        raise ConfigurationError(f"it is more than a decoder of text: {', '.join(parts)}")
    kinds: Iterable[Any] = getattr(config, "layer_types", None) or ()
    if others := sorted({str(kind) for kind in kinds} - KINDS):
        raise ConfigurationError(f"it has layers with other state than keys and values: {', '.join(others)}")


def check_modules(model: PreTrainedModel) -> None:
    """Refuses what the modules show, by the names that their code uses for the state of a sequence.

    Raises:
        ConfigurationError: a module keeps other state than keys and values, or chooses the keys to attend to.
    """
    if getattr(model, "_is_stateful", False):
        raise ConfigurationError("its layers keep a recurrent state")
    if "position_ids" not in inspect.signature(getattr(model, body_name(model)).forward).parameters:
        raise ConfigurationError("it takes no positions")
    for kind in {type(module) for module in model.modules()}:
        name = kind.__name__
        if issubclass(kind, nn.Conv1d | nn.RNNBase):
            raise ConfigurationError(f"its layers keep a state of earlier inputs ({name})")
        if kind.__module__.startswith("torch."):
            continue
        if "Indexer" in name:
            raise ConfigurationError(f"it chooses the keys to attend to ({name})")
        if issubclass(kind, PreTrainedModel):
            continue
        if match := _STATE.search(inspect.getsource(kind)):
            raise ConfigurationError(f"its layers keep a state of earlier inputs ({name}: {match[0]})")


def body_name(model: PreTrainedModel) -> str:
    """Returns the name of the module that turns ids into hidden states.

    Raises:
        ConfigurationError: there is none.
    """
    base = next((name for name in (model.base_model_prefix, "model") if name in model._modules), None)
    if base is None:
        raise ConfigurationError("its output layer cannot be told from its other layers")
    return base


def max_length(config: PretrainedConfig) -> int | None:
    """Returns the context up to which positions are rotated independently of the batch; None: any.

    Beyond it, longrope rotates all positions of a step by other angles.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
    bounds = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(bounds, default=None)
