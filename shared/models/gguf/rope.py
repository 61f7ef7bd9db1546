"""The rotation of queries and keys in a GGUF file, in the format of Hugging Face's `rope_parameters`."""

import math
import os
from typing import Any

import numpy as np

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.keys import Keys
from pagewire.shared.models.gguf.reader import GgufModel

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor with the divisor of each frequency, in Llama 3.1 and later."""
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""Names of the tensors with longrope's divisors of each frequency."""


def rope_parameters(keys: Keys) -> dict[str, Any]:
    """Returns the `rope_parameters` of layers without a window.

    Raises:
        ConfigurationError: the kind of scaling is not supported, or a tensor of factors cannot be read.
    """
    model = keys.model
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10000.0)}
    rotated, head = keys.number("rope.dimension_count", keys.head_size), keys.head_size
    if rotated != head:
        parameters["partial_rotary_factor"] = rotated / head
    kind, factor = _scaling(keys)
    original = keys.number("rope.scaling.original_context_length", 0)
    attention = keys.real("rope.scaling.attn_factor", keys.real("rope.scaling.yarn_attn_factor", 1.0))
    if original:
        parameters["original_max_position_embeddings"] = original
    if SHORT in model.tensors:
        parameters |= {"rope_type": "longrope", "factor": keys.number("context_length") / (original or 1)}
        parameters |= {"short_factor": factors(model, SHORT), "long_factor": factors(model, LONG)}
        if keys.find("rope.scaling.attn_factor") is not None:
            parameters["attention_factor"] = attention
    elif kind == "yarn":
        parameters |= {"rope_type": "yarn", "factor": factor}
        parameters |= {
            name: keys.real(f"rope.scaling.yarn_{name}", usual)
            for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
            if keys.find(f"rope.scaling.yarn_{name}") is not None
        }
        if attention != 1.0:
            # In GGUF it multiplies the value derived from the factor; in config.json it replaces that value.
            parameters["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    elif kind == "linear":
        parameters |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise ConfigurationError(f"{model.path} scales its rotary positions by {kind}, which is not supported")
    if ROPE_FACTORS in model.tensors:
        parameters |= {"rope_type": "factors", "factors": factors(model, ROPE_FACTORS)}
    return parameters


def _scaling(keys: Keys) -> tuple[Any, float]:
    """Returns the kind of scaling and its factor. As in llama.cpp, a factor without a kind means linear scaling."""
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    kind = keys.find("rope.scaling.type", "linear")
    return ("none" if kind == "linear" and factor in {0.0, 1.0} else kind), factor


def factors(model: GgufModel, name: str) -> list[float]:
    """Returns a tensor of rotation factors.

    Raises:
        ConfigurationError: the tensor is missing, cannot be read, or does not hold float32 numbers.
    """
    tensor = model.tensors.get(name)
    if tensor is None or tensor.type.name != "F32":
        kind = "nothing" if tensor is None else tensor.type.name
        raise ConfigurationError(f"{model.path} stores {name} as {kind}: only F32 can be read")
    try:
        with tensor.file.open("rb") as file:
            data = os.pread(file.fileno(), tensor.rows * tensor.row_bytes, tensor.offset)
    except OSError as error:
        raise ConfigurationError(f"cannot read {tensor.file}: {error.strerror}") from error
    numbers: list[float] = np.frombuffer(data, "<f4").tolist()
    return numbers
