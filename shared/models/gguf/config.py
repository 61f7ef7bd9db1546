"""The configuration of a GGUF model in the format of Hugging Face's config.json."""

import math
import os
from typing import Any

import numpy as np

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.reader import GgufModel, Strings

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Hugging Face's architecture by `general.architecture`. Mistral's models are published as `llama`."""
END_OF_TURN = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<end_of_turn>", "<EOT>")
)
"""Texts of the tokens that end an answer, as in llama.cpp: the metadata names one, but chat models have several."""
ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor with the divisor of each frequency, in Llama 3.1 and later."""
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

_CONTROL = 3
_DTYPES = {"F32": "float32", "F16": "float16"}


def read_config(model: GgufModel) -> dict[str, Any]:
    """Returns the fields of the model's config.json that Pagewire reads.

    `dtype` is the dtype of the matrices, or bfloat16 if they are quantized.

    Raises:
        ConfigurationError: the architecture is not supported, or the metadata is incomplete or contradictory.
    """
    architecture = model.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigurationError(
            f"{model.path} is of architecture {architecture}, which is not supported as GGUF; "
            f"these are: {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(model, architecture)
    if keys.number("expert_count", 0):
        raise ConfigurationError(f"{model.path} is a mixture of experts, which is not supported")
    if EMBEDDING not in model.tensors:
        raise ConfigurationError(f"{model.path} has no tensor {EMBEDDING}: fetch the model again")
    heads, width = keys.number("attention.head_count"), keys.number("embedding_length")
    if not heads:
        raise ConfigurationError(f"{model.path} has 0 as {architecture}.attention.head_count: fetch the model again")
    head = keys.number("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.number(key, head) != head:
            raise ConfigurationError(
                f"{model.path} has a {key} that differs from its heads' size, {head}: not supported"
            )
    window = keys.number("attention.sliding_window", 0)
    if window and architecture != "llama":
        raise ConfigurationError(f"{model.path} has sliding windows, which {architecture} as GGUF does not support")
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if window else ARCHITECTURES[architecture]],
        "model_type": "mistral" if window else architecture,
        "vocab_size": model.tensors[EMBEDDING].shape[0],
        "hidden_size": width,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_parameters": _rope(model, keys),
        "attention_bias": "blk.0.attn_output.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in model.tensors,
        "tie_word_embeddings": OUTPUT not in model.tensors,
        "dtype": _dtype(model),
        "eos_token_id": sorted(eos_ids(model)),
    }
    return config | ({"sliding_window": window} if window else {})


def eos_ids(model: GgufModel) -> frozenset[int]:
    """Returns the ids of the tokens that end a text: the ids in the metadata, and control tokens in `END_OF_TURN`."""
    key = "tokenizer.ggml.tokens"
    kinds = np.asarray(model.metadata.get("tokenizer.ggml.token_type", ()))
    controls = dict.fromkeys(np.flatnonzero(kinds == _CONTROL).tolist())
    ends = {id_ for id_, token in zip(controls, model.strings(key, controls), strict=False) if token in END_OF_TURN}
    tokens = model.metadata.get(key)
    count = tokens.number if isinstance(tokens, Strings) else 0
    named = (model.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return frozenset(ends | {id_ for id_ in named if type(id_) is int and 0 <= id_ < count})


class _Keys:
    """The metadata of one architecture. Keys leave out its name."""

    def __init__(self, model: GgufModel, architecture: str) -> None:
        self._path, self._metadata, self._prefix = model.path, model.metadata, architecture

    def number(self, key: str, default: int | None = None) -> int:
        """Returns an integer. If the value is a list with one entry per layer, all entries must be equal."""
        value = self.find(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise ConfigurationError(f"{self._path} has layers that differ in {self._prefix}.{key}: not supported")
        if type(value) is not int or value < 0:
            raise ConfigurationError(f"{self._path} has no number {self._prefix}.{key}: fetch the model again")
        return value

    def real(self, key: str, default: float) -> float:
        """Returns a float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
        value = self.find(key, default)
        if type(value) not in {int, float}:
            raise ConfigurationError(
                f"{self._path} has a {self._prefix}.{key} that is no number: fetch the model again"
            )
        return float(str(np.float32(value)))

    def find(self, key: str, default: Any = None) -> Any:
        """Returns the value, which may be of any type."""
        return self._metadata.get(f"{self._prefix}.{key}", default)


def _rope(model: GgufModel, keys: _Keys) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10000.0)}
    kind = keys.find("rope.scaling.type", "none")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    if kind == "yarn":
        parameters |= {"rope_type": "yarn", "factor": factor}
        if original := keys.number("rope.scaling.original_context_length", 0):
            parameters["original_max_position_embeddings"] = original
        if (attention := keys.real("rope.scaling.attn_factor", 1.0)) != 1.0:
            # In GGUF it multiplies the value derived from the factor; in config.json it replaces that value.
            parameters["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    elif kind == "linear" or (kind == "none" and factor not in {0.0, 1.0}):
        parameters |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise ConfigurationError(f"{model.path} scales its rotary positions by {kind}, which is not supported")
    if ROPE_FACTORS in model.tensors:
        parameters |= {"rope_type": "factors", "factors": _factors(model)}
    return parameters


def _factors(model: GgufModel) -> list[float]:
    tensor = model.tensors[ROPE_FACTORS]
    if tensor.type.name != "F32":
        raise ConfigurationError(f"{model.path} stores {ROPE_FACTORS} as {tensor.type.name}: only F32 can be read")
    try:
        with tensor.file.open("rb") as file:
            data = os.pread(file.fileno(), tensor.rows * tensor.row_bytes, tensor.offset)
    except OSError as error:
        raise ConfigurationError(f"cannot read {tensor.file}: {error.strerror}") from error
    factors: list[float] = np.frombuffer(data, "<f4").tolist()
    return factors


def _dtype(model: GgufModel) -> str:
    kinds = {tensor.type.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    return _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"
