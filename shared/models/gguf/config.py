"""The configuration of a GGUF model in the format of Hugging Face's config.json."""

from typing import Any

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.architectures import ARCHITECTURES, reason
from pagewire.shared.models.gguf.ends import eos_ids
from pagewire.shared.models.gguf.keys import EMBEDDING, OUTPUT, Keys
from pagewire.shared.models.gguf.reader import GgufModel
from pagewire.shared.models.gguf.rope import rope_parameters
from pagewire.shared.sampling_parameters import PARAMETERS

_SAMPLING_KEYS = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
"""Keys of `general.sampling` that are not the parameter's name."""
_SAMPLING = {_SAMPLING_KEYS.get(each.name, each.name): each.name for each in PARAMETERS}
_DTYPES = {"F32": "float32", "F16": "float16"}
_HARMLESS = frozenset(
    (
        "attention.causal",
        "expert_feed_forward_length",
        "expert_gating_func",
        "expert_shared_feed_forward_length",
        "feed_forward_length",
        "n_deepstack_layers",
        "pooling_type",
        "rope.dimension_sections",
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "vocab_size",
    )
)
"""Keys that tensors or the family imply, or that change no text."""
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")


def read_config(model: GgufModel) -> dict[str, Any]:
    """Returns the fields of the model's config.json that Pagewire and transformers read.

    `dtype` is the dtype of the matrices, or bfloat16 if they are quantized.

    Raises:
        ConfigurationError: the architecture is not supported, or the metadata is incomplete or contradictory.
    """
    return _read(model)[0]


def ignored_keys(model: GgufModel) -> list[str]:
    """Returns the keys of the file's architecture that its configuration leaves out, but for harmless ones."""
    return [key for key in _read(model)[1].unread() if key not in _HARMLESS]


def _read(model: GgufModel) -> tuple[dict[str, Any], Keys]:
    """Returns the configuration, and the keys that it has been read from."""
    name = model.metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise ConfigurationError(
            f"{model.path} is of architecture {name}, which is not supported as GGUF: {reason(str(name))}. "
            f"These are: {', '.join(ARCHITECTURES)}"
        )
    if EMBEDDING not in model.tensors:
        raise ConfigurationError(f"{model.path} has no tensor {EMBEDDING}: fetch the model again")
    keys = Keys(model, str(name), architecture.varying)
    names = {"architectures": [architecture.name], "model_type": architecture.model_type}
    try:
        return names | common_fields(keys) | expert_fields(keys) | architecture.fields(keys), keys
    except (ArithmeticError, LookupError, ValueError) as error:
        raise ConfigurationError(
            f"{model.path} has metadata that contradicts itself ({error}): fetch the model again"
        ) from error


def common_fields(keys: Keys) -> dict[str, Any]:
    """Returns the fields of config.json that most families have. Each number has all names that families give it.

    Raises:
        ConfigurationError: the metadata is incomplete or contradictory.
    """
    model, heads, head = keys.model, keys.number("attention.head_count"), keys.head_size
    if keys.find("attention.kv_lora_rank") is None and keys.number("attention.value_length", head) != head:
        raise ConfigurationError(
            f"{model.path} has an attention.value_length that differs from its heads' size, {head}: not supported"
        )
    eps = keys.real("attention.layer_norm_rms_epsilon", keys.real("attention.layer_norm_epsilon", 1e-5))
    biased = any(keys.tensor(name, "bias") is not None for name in ("attn_q", "attn_qkv", "attn_output"))
    return {
        "vocab_size": model.tensors[EMBEDDING].shape[0],
        "hidden_size": keys.number("embedding_length"),
        "intermediate_size": keys.inner,
        "num_hidden_layers": keys.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": keys.number("context_length"),
        **dict.fromkeys(_EPS, eps),
        "rope_parameters": rope_parameters(keys),
        "attention_bias": biased,
        "mlp_bias": keys.tensor("ffn_down", "bias") is not None,
        "tie_word_embeddings": OUTPUT not in model.tensors,
        "dtype": _dtype(model),
        "eos_token_id": sorted(eos_ids(model)),
        "pad_token_id": None,
    }


def expert_fields(keys: Keys) -> dict[str, Any]:
    """Returns the fields of a mixture of experts; none of a dense model."""
    count = keys.number("expert_count", 0)
    if not count:
        return {}
    return {
        **dict.fromkeys(_EXPERTS, count),
        **dict.fromkeys(_CHOSEN, keys.number("expert_used_count")),
        "moe_intermediate_size": keys.rows("ffn_up_exps"),
        "n_shared_experts": keys.number("expert_shared_count", 0),
        "num_shared_experts": keys.number("expert_shared_count", 0),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0) or 1.0,
        "n_group": keys.number("expert_group_count", 1) or 1,
        "topk_group": keys.number("expert_group_used_count", 1) or 1,
    }


def sampling(model: GgufModel) -> dict[str, float]:
    """Returns the parameters of sampling that the file recommends, by their names in generation_config.json."""
    values = {name: model.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _dtype(model: GgufModel) -> str:
    kinds = {tensor.type.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    return _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"
