"""Fields of config.json that families of GGUF files name otherwise than most, or have besides.

Each function returns such fields. Defaults are llama.cpp's, which has some numbers in its code alone.
"""

import math
from typing import Any

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.keys import Keys
from pagewire.shared.models.gguf.rope import ROPE_FACTORS, factors, rope_parameters

_MAVERICK = 128
"""Experts of the Llama 4 whose queries and keys are not normalised."""
_BAICHUAN_13B = 40
"""Layers of the Baichuan without a rotation."""


def llama(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Llama, or of Mistral and Mixtral, which are published as Llama."""
    if keys.number("expert_count", 0):
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    if window := keys.number("attention.sliding_window", 0):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {}


def mistral3(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Mistral 3, whose scores are scaled by the position."""
    rope = rope_parameters(keys)
    scale = keys.real("attention.temperature_scale", 0.0)
    length = keys.number("rope.scaling.original_context_length", keys.number("context_length"))
    multiplier = keys.real("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier:
        rope |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    scaled = {"llama_4_scaling_beta": scale, "original_max_position_embeddings": length}
    return {"rope_parameters": rope | scaled, "sliding_window": None}


def qwen2_moe(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Qwen 2 MoE."""
    return {
        "shared_expert_intermediate_size": keys.rows("ffn_up_shexp"),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=False),
        "qkv_bias": keys.tensor("attn_q", "bias") is not None,
    }


def qwen3_moe(_keys: Keys) -> dict[str, Any]:
    """Returns the fields of Qwen 3 MoE."""
    return {"norm_topk_prob": True}  # llama.cpp has no key for it


def gemma2(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Gemma 2."""
    return keys.sliding(pattern=2, window=4096) | {
        "query_pre_attn_scalar": _query_scalar(keys, layers=46),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
    }


def gemma3(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Gemma 3."""
    return keys.sliding(pattern=6) | {
        "query_pre_attn_scalar": _query_scalar(keys, layers=62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
        "rope_parameters": _ropes_by_kind(keys),
    }


def _query_scalar(keys: Keys, layers: int) -> float:
    """Returns the number by whose root Gemma divides scores. llama.cpp knows the models of 27B by their `layers`."""
    if keys.layers == layers:
        return keys.number("embedding_length") / keys.number("attention.head_count")
    return float(keys.head_size)


def _ropes_by_kind(keys: Keys, local_theta: float = 10000.0) -> dict[str, Any]:
    """Returns the rotations of full layers, and of layers with a window, which are not scaled."""
    local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", local_theta)}
    return {"full_attention": rope_parameters(keys), "sliding_attention": local}


def gemma3n(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Gemma 3n."""
    thresholds = keys.reals("activation_sparsity_scale")
    return keys.sliding(pattern=5) | {
        "rope_parameters": _ropes_by_kind(keys),
        "intermediate_size": [keys.number("feed_forward_length")] * keys.layers,
        "altup_active_idx": keys.number("altup.active_idx"),
        "altup_num_inputs": keys.number("altup.num_inputs"),
        "laurel_rank": keys.rows("laurel_l"),
        "hidden_size_per_layer_input": keys.number("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": keys.model.tensors["per_layer_token_embd.weight"].shape[0],
        "num_kv_shared_layers": keys.number("attention.shared_kv_layers", 0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
        # The file has the number of standard deviations that cut off a share of a normal distribution.
        "activation_sparsity_pattern": [
            0.0 if cut < -1e3 or cut == 0 else 0.5 + 0.5 * math.erf(cut / math.sqrt(2)) for cut in thresholds
        ],
    }


def gemma4(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Gemma 4."""
    kinds = keys.sliding(pattern=6, window=512)
    is_full = [kind == "full_attention" for kind in kinds["layer_types"]]
    inner, kv_heads = keys.reals("feed_forward_length"), keys.reals("attention.head_count_kv")
    head, local_head = keys.head_size, keys.number("attention.key_length_swa", keys.head_size)
    divisors = factors(keys.model, ROPE_FACTORS)
    rotated = sum(divisor < 1e29 for divisor in divisors) / len(divisors)  # the others do not turn
    local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 10000.0)}
    local_rotated = keys.number("rope.dimension_count_swa", local_head)
    if local_rotated != local_head:
        local["partial_rotary_factor"] = local_rotated / local_head
    full = {"rope_type": "proportional", "rope_theta": keys.real("rope.freq_base", 1e6)}
    embedding = keys.model.tensors.get("per_layer_token_embd.weight")
    experts = keys.number("expert_count", 0)
    return kinds | {
        "rope_parameters": {
            "full_attention": full | {"partial_rotary_factor": rotated},
            "sliding_attention": local,
        },
        "head_dim": local_head,
        "global_head_dim": head,
        "num_key_value_heads": int(kv_heads[is_full.index(False)]),
        "num_global_key_value_heads": int(kv_heads[is_full.index(True)]),
        "attention_k_eq_v": f"blk.{is_full.index(True)}.attn_v.weight" not in keys.model.tensors,
        "intermediate_size": int(inner[0]),
        "use_double_wide_mlp": inner[-1] > inner[0],
        "hidden_size_per_layer_input": keys.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": embedding.shape[0] if embedding else 0,
        "num_kv_shared_layers": keys.number("attention.shared_kv_layers", 0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": keys.number("expert_used_count", 0) or None,
        "moe_intermediate_size": keys.rows("ffn_gate_up_exps") // 2 or None,
    }


def olmo(keys: Keys) -> dict[str, Any]:
    """Returns the fields of OLMo."""
    return {"clip_qkv": keys.real("attention.clamp_kqv", 0.0) or None}


def olmo2(keys: Keys) -> dict[str, Any]:
    """Returns the fields of OLMo 2, or of OLMo 3, which has windows."""
    if not keys.number("attention.sliding_window", 0):
        return {}
    return keys.sliding(pattern=4) | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_parameters": _ropes_by_kind(keys, keys.real("rope.freq_base", 10000.0)),
    }


def smollm3(_keys: Keys) -> dict[str, Any]:
    """Returns the fields of SmolLM3."""
    return {"no_rope_layer_interval": 4}


def gpt2(keys: Keys) -> dict[str, Any]:
    """Returns the fields of GPT-2 and StarCoder."""
    return {
        "n_positions": keys.number("context_length"),
        "n_embd": keys.number("embedding_length"),
        "n_layer": keys.layers,
        "n_head": keys.number("attention.head_count"),
        "n_inner": keys.inner,
        "multi_query": keys.number("attention.head_count_kv", 0) == 1,
    }


def gpt_neox(keys: Keys) -> dict[str, Any]:
    """Returns the fields of GPT-NeoX."""
    return {
        "rotary_pct": keys.number("rope.dimension_count", keys.head_size) / keys.head_size,
        "use_parallel_residual": keys.flag("use_parallel_residual", default=True),
    }


def starcoder2(keys: Keys) -> dict[str, Any]:
    """Returns the fields of StarCoder 2."""
    return {"use_bias": keys.tensor("attn_q", "bias") is not None, "sliding_window": None}


def stablelm(keys: Keys) -> dict[str, Any]:
    """Returns the fields of StableLM."""
    return {
        "use_qkv_bias": keys.tensor("attn_q", "bias") is not None,
        "qk_layernorm": keys.tensor("attn_q_norm") is not None,
        "use_parallel_residual": keys.tensor("ffn_norm") is None,
    }


def cohere(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Command R."""
    return {"logit_scale": keys.real("logit_scale", 1.0), "use_qk_norm": keys.tensor("attn_q_norm") is not None}


def cohere2(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Command R7B and A."""
    return keys.sliding(pattern=4) | {"logit_scale": keys.real("logit_scale", 1.0)}


def exaone4(keys: Keys) -> dict[str, Any]:
    """Returns the fields of EXAONE 4."""
    return keys.sliding(pattern=4) | {"sliding_window_pattern": None}


def exaone_moe(keys: Keys) -> dict[str, Any]:
    """Returns the fields of EXAONE MoE."""
    dense = keys.number("leading_dense_block_count", 1)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(keys.layers)]
    return exaone4(keys) | {"mlp_layer_types": kinds}


def granite(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Granite and MiniCPM."""
    fields = {
        "attention_multiplier": keys.real("attention.scale", 0.0) or keys.head_size**-0.5,
        "embedding_multiplier": keys.real("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": keys.real("residual_scale", 1.0) or 1.0,
        "logits_scaling": keys.real("logit_scale", 1.0) or 1.0,
    }
    if shared := keys.rows("ffn_up_shexp"):
        fields |= {"shared_intermediate_size": shared}
        return fields | {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}
    return fields


def ernie(keys: Keys) -> dict[str, Any]:
    """Returns the fields of ERNIE 4.5."""
    return {
        "use_bias": keys.tensor("attn_q", "bias") is not None,
        "moe_num_shared_experts": keys.number("expert_shared_count", 0),
        "moe_layer_start_index": keys.number("leading_dense_block_count", 0),
        "moe_layer_end_index": keys.layers - 1,
        "moe_layer_interval": keys.number("interleave_moe_layer_step", 1) or 1,
    }


def glm4_moe(keys: Keys) -> dict[str, Any]:
    """Returns the fields of GLM 4 MoE."""
    return {"use_qk_norm": keys.tensor("attn_q_norm") is not None}


def seed_oss(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Seed-OSS."""
    return {"attention_out_bias": keys.tensor("attn_output", "bias") is not None}


def deepseek2(keys: Keys) -> dict[str, Any]:
    """Returns the fields of DeepSeek V2 and V3."""
    rotated = keys.number("rope.dimension_count")
    head = keys.number("attention.key_length_mla", keys.number("attention.key_length", 0))
    sigmoid = keys.number("expert_gating_func", 1) == 2 or keys.tensor("exp_probs_b", "bias") is not None
    rope = rope_parameters(keys)
    rope.pop("partial_rotary_factor", None)
    if rope["rope_type"] == "yarn":
        # llama.cpp stores a tenth of mscale_all_dim, and the published models have mscale equal to it.
        scale = 10.0 * keys.real("rope.scaling.yarn_log_multiplier", 0.0)
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    fields = {
        "rope_parameters": rope,
        "head_dim": rotated,
        "num_key_value_heads": keys.number("attention.head_count"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": keys.number("attention.value_length_mla", keys.number("attention.value_length", 0)),
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "q_lora_rank": keys.number("attention.q_lora_rank", 0) or None,
        "norm_topk_prob": keys.flag("expert_weights_norm", default=sigmoid),
    }
    if sigmoid:
        return fields
    grouped = (keys.number("expert_group_count", 0) or 1) > 1
    return fields | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


def minicpm3(keys: Keys) -> dict[str, Any]:
    """Returns the fields of MiniCPM 3."""
    heads, rotated = keys.number("attention.head_count"), keys.number("rope.dimension_count")
    plain = keys.number("attention.key_length") - rotated
    rope = {key: value for key, value in rope_parameters(keys).items() if key != "partial_rotary_factor"}
    return {
        "rope_parameters": rope,
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": plain,
        "v_head_dim": keys.rows("attn_kv_b") // heads - plain,
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "q_lora_rank": keys.number("attention.q_lora_rank"),
        # llama.cpp has no keys for them: there is one model.
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def llama4(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Llama 4."""
    return {
        "intermediate_size": keys.rows("ffn_up_exps"),
        "intermediate_size_mlp": keys.number("feed_forward_length"),
        "interleave_moe_layer_step": keys.number("interleave_moe_layer_step", 1),
        "attention_chunk_size": 8192,
        "use_qk_norm": keys.number("expert_count") != _MAVERICK,
    }


def baichuan(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Baichuan; that of 7B is a Llama.

    Raises:
        ConfigurationError: it is that of 13B.
    """
    if keys.layers == _BAICHUAN_13B:
        raise ConfigurationError(f"{keys.model.path} has scores that depend on distance by a bias: not supported")
    return {}


def minimax_m2(keys: Keys) -> dict[str, Any]:
    """Returns the fields of MiniMax M2."""
    return {"rotary_dim": keys.number("rope.dimension_count")}


def gpt_oss(keys: Keys) -> dict[str, Any]:
    """Returns the fields of gpt-oss."""
    rope = rope_parameters(keys)
    return keys.sliding(pattern=2) | {
        "intermediate_size": keys.rows("ffn_up_exps"),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def afmoe(keys: Keys) -> dict[str, Any]:
    """Returns the fields of AFMoE."""
    return keys.sliding(pattern=4) | {
        "mup_enabled": True,
        "num_shared_experts": keys.number("expert_shared_count", 0),
        "num_dense_layers": keys.number("leading_dense_block_count", 0),
        "route_scale": keys.real("expert_weights_scale", 1.0),
    }


def phimoe(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Phi MoE."""
    return {"lm_head_bias": "output.bias" in keys.model.tensors, "sliding_window": None}


def phi3(keys: Keys) -> dict[str, Any]:
    """Returns the fields of Phi 3."""
    return {"sliding_window": keys.number("attention.sliding_window", 0) or None}
