"""A tiny model of every family that transformers generates text with."""

import math
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 512
CONTEXT = 256
TRAINED = 32
"""Positions for which a model with an extended context was trained first."""
WINDOW = 12
"""Tokens of a sliding window and of a chunk: fewer than the texts have."""
LAYERS = 4
LARGEST = 30_000_000
"""Parameters of a tiny model."""

FAMILIES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Every model_type with a model that generates text."""

_HEADS, _WIDTH, _HEAD, _EXPERTS = 4, 64, 16, 4
_SMALL: dict[str, Any] = {
    # the sizes of a transformer, by all names
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), _WIDTH
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(
        ("head_dim", "d_kv", "attention_head_dim", "kv_channels", "swa_head_dim", "global_head_dim"), _HEAD
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "shared_intermediate_size"), 96
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len"), CONTEXT),
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_expert_group"), 1),
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": LAYERS - 1,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 12,
    # windows
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "local_attention": WINDOW,
    "max_window_layers": 2,
    # other thresholds of positions: fewer than the texts have
    "floor_scale": WINDOW,
    # other
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "num_hash_layers": 1,
    "rotary_dim": 8,
    "dim_model_base": 32,
    "is_decoder": True,
}
_IDS = {"pad_token_id": 1, "eos_token_id": 0, "bos_token_id": 0}


def tiny_config(family: str) -> PretrainedConfig:
    """The default configuration of a family, made small."""
    known = AutoConfig.for_model(family).to_dict()
    changes = _small(known) | {
        name: {"model_type": part["model_type"]} | _small(part)
        for name, part in known.items()
        if isinstance(part, dict) and "model_type" in part
    }
    config = AutoConfig.for_model(family, **changes | OVERRIDES.get(family, {}))
    config.dtype = "float32"
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters are not tiny")
    return config


def _small(known: dict[str, Any]) -> dict[str, Any]:
    """The changes of a configuration, or of a part of one, that make it small."""
    changes = {name: value for name, value in _SMALL.items() if known.get(name) is not None}
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "long_factor" not in rope:  # those do not fit a head of any size
        trained = {"original_max_position_embeddings": TRAINED} if "original_max_position_embeddings" in rope else {}
        changes["rope_parameters"] = rope | trained
    if known.get("qk_rope_head_dim") is not None:
        changes |= {"head_dim": _SMALL["qk_rope_head_dim"], "num_key_value_heads": _HEADS}
    return changes | _IDS


_SHARED_KV = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    # The last two layers take keys and values from the one before them that attends as they do.
    "gemma3n_text": _SHARED_KV,
    "gemma4_text": _SHARED_KV | {"use_double_wide_mlp": True},
    "gemma4_unified_text": _SHARED_KV | {"use_double_wide_mlp": True},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},  # as all published ones
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that the defaults of a family leave out, or that cannot be made small by name."""


PUBLISHED = {
    "exaone": "ExaoneForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
}
"""Architectures in published checkpoints, where transformers uses the class of another family."""


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, large enough that its tokens vary."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() < 2:  # biases start as zeros and norms as ones: nothing would notice if they were lost
                parameter.add_(noise, alpha=0.2)
            elif parameter in embeddings:
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    return model
