"""A tiny GGUF file of every architecture, as llama.cpp's converter writes it, by the writer of the package `gguf`."""

import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import Keys
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.families.tiny import tiny_config, tiny_model
from tests.support.checkpoints import LLAMA3, YARN, tokenizer
from tests.support.gguf_files import add_byte_level, finish, pack

Array = npt.NDArray[np.float32]
Settings = dict[str, Any]


class Tiny(NamedTuple):
    """The configuration and the keys of an architecture's tiny model."""

    family: str
    """Its `model_type` in transformers."""
    settings: Settings = {}  # noqa: RUF012 - never changed
    """Changes of its tiny configuration."""
    metadata: Callable[[PretrainedConfig], Settings] = lambda _config: {}
    """Further keys of the file, without the name of the architecture."""


def _granite(config: PretrainedConfig) -> Settings:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


_GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}


def _gemma3n(config: PretrainedConfig) -> Settings:
    normal = statistics.NormalDist()
    return {
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "feed_forward_length": [int(size) for size in config.intermediate_size],
        "activation_sparsity_scale": [
            normal.inv_cdf(share) if share else 0.0 for share in config.activation_sparsity_pattern
        ],
    }


_GEMMA4 = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


def _gemma4(config: PretrainedConfig) -> Settings:
    heads = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    kinds, shared = config.layer_types, config.num_kv_shared_layers
    multiples = [1] * (config.num_hidden_layers - shared) + [1 + config.use_double_wide_mlp] * shared
    return {
        "attention.shared_kv_layers": shared,
        "feed_forward_length": [multiple * config.intermediate_size for multiple in multiples],
        "attention.head_count_kv": [head.num_key_value_heads for head in heads],
        "attention.key_length": heads[-1].head_dim,
        "attention.value_length": heads[-1].head_dim,
        "attention.key_length_swa": heads[kinds.index("sliding_attention")].head_dim,
        "rope.dimension_count": heads[-1].head_dim,
        "rope.dimension_count_swa": heads[kinds.index("sliding_attention")].head_dim,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "expert_used_count": config.top_k_experts,
    }


def _latent(config: PretrainedConfig) -> Settings:
    rotated, head = config.qk_rope_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + rotated,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": head,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotated,
    }


def _latent_joined(config: PretrainedConfig) -> Settings:
    return {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def _llama4(config: PretrainedConfig) -> Settings:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


def _sigmoid(config: PretrainedConfig) -> Settings:
    del config
    return {"expert_gating_func": 2}


_FULL = {"sliding_window": None, "layer_types": None}

TINY: Mapping[str, Tiny] = {
    "afmoe": Tiny("afmoe", {"mup_enabled": True, "route_scale": 1.7}, _sigmoid),
    "apertus": Tiny("apertus", {"rope_parameters": LLAMA3}),
    "arcee": Tiny("arcee"),
    "baichuan": Tiny("llama"),
    "chatglm": Tiny("glm"),
    "cohere2": Tiny("cohere2", {"logit_scale": 0.5}),
    "command-r": Tiny("cohere", {"logit_scale": 0.5}),
    "deepseek2": Tiny("deepseek_v3", {}, lambda config: _latent(config) | _sigmoid(config)),
    "dots1": Tiny("dots1", _FULL | {"norm_topk_prob": True}, _sigmoid),
    "ernie4_5": Tiny("ernie4_5"),
    "ernie4_5-moe": Tiny("ernie4_5_moe", {}, lambda config: {"interleave_moe_layer_step": config.moe_layer_interval}),
    "exaone": Tiny("exaone", {"rope_parameters": LLAMA3}),
    "exaone-moe": Tiny("exaone_moe", {}, _sigmoid),
    "exaone4": Tiny("exaone4"),
    "gemma": Tiny("gemma"),
    "gemma2": Tiny("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": Tiny("gemma3_text", {"query_pre_attn_scalar": 16}),
    "gemma3n": Tiny("gemma3n_text", {"activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0]}, _gemma3n),
    "gemma4": Tiny("gemma4_text", _GEMMA4, _gemma4),
    "glm4": Tiny("glm4"),
    "glm4moe": Tiny("glm4_moe", {"use_qk_norm": True, "routed_scaling_factor": 1.7}, _sigmoid),
    "gpt-oss": Tiny("gpt_oss", {"rope_parameters": YARN | {"truncate": False}}),
    "gpt2": Tiny("gpt2"),
    "gptneox": Tiny("gpt_neox"),
    "granite": Tiny("granite", _GRANITE, _granite),
    "granitemoe": Tiny("granitemoe", _GRANITE, _granite),
    "hunyuan-dense": Tiny("hunyuan_v1_dense"),
    "hunyuan-moe": Tiny("hunyuan_v1_moe"),
    "internlm2": Tiny("llama"),
    "jais2": Tiny("jais2"),
    "llama": Tiny("llama", {"rope_parameters": LLAMA3}),
    "llama4": Tiny("llama4_text", {"attention_chunk_size": 8192, "layer_types": None}, _llama4),
    "maincoder": Tiny("qwen3"),
    "minicpm": Tiny("granite", _GRANITE | {"attention_multiplier": 0.25}, _granite),
    "minicpm3": Tiny("minicpm3", {"dim_model_base": 256}, _latent_joined),
    "minimax-m2": Tiny("minimax_m2", {"rotary_dim": 8}, _sigmoid),
    "mistral3": Tiny(
        "ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}}
    ),
    "nemotron": Tiny("nemotron"),
    "olmo": Tiny("olmo", {"clip_qkv": 1.5}),
    "olmo2": Tiny("olmo2"),
    "olmoe": Tiny("olmoe"),
    "pangu-embedded": Tiny("llama", {"attention_bias": True}),
    "phi2": Tiny("phi"),
    "phi3": Tiny("phi3"),
    "phimoe": Tiny("phimoe"),
    "qwen": Tiny(
        "qwen2", {"num_key_value_heads": 4}, lambda config: {"feed_forward_length": 2 * config.intermediate_size}
    ),
    "qwen2": Tiny("qwen2"),
    "qwen2moe": Tiny("qwen2_moe"),
    "qwen2vl": Tiny("qwen2"),
    "qwen3": Tiny("qwen3"),
    "qwen3moe": Tiny("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3vl": Tiny("qwen3"),
    "qwen3vlmoe": Tiny("qwen3_moe", {"norm_topk_prob": True}),
    "seed_oss": Tiny("seed_oss"),
    "smollm3": Tiny("smollm3"),
    "stablelm": Tiny("stablelm", {"qk_layernorm": True}),
    "starcoder": Tiny("gpt_bigcode", {}, lambda _config: {"attention.head_count_kv": 1}),
    "starcoder2": Tiny("starcoder2"),
    "xverse": Tiny("llama"),
}
"""By `general.architecture`."""

_INTERLEAVED = frozenset(
    (
        "arcee",
        "baichuan",
        "granite",
        "granitemoe",
        "internlm2",
        "llama",
        "minicpm",
        "mistral3",
        "olmo",
        "smollm3",
        "xverse",
    )
)
"""Architectures whose queries and keys the converter orders for ggml's rotation."""

_TRANSPOSED_EXPERTS = frozenset(("gpt-oss", "llama4"))
_RENAMED = {
    "e_score_correction_bias": "e_score_correction.bias",
    ".gate.moe_statics.": ".moe_statics.",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    "block_sparse_moe.experts.": "mlp.experts.",
}
"""Parts of names in transformers, and those that published checkpoints have."""

_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (Keys.LLM.CONTEXT_LENGTH, ("max_position_embeddings", "n_positions")),
    (Keys.LLM.EMBEDDING_LENGTH, ("hidden_size", "n_embd")),
    (Keys.LLM.FEED_FORWARD_LENGTH, ("intermediate_size", "n_inner")),
    (Keys.LLM.BLOCK_COUNT, ("num_hidden_layers", "n_layer")),
    (Keys.Attention.HEAD_COUNT, ("num_attention_heads", "n_head")),
    (Keys.Attention.HEAD_COUNT_KV, ("num_key_value_heads",)),
    (Keys.Attention.KEY_LENGTH, ("head_dim",)),
    (Keys.Attention.VALUE_LENGTH, ("head_dim",)),
    (Keys.Attention.LAYERNORM_RMS_EPS, ("rms_norm_eps",)),
    (Keys.Attention.LAYERNORM_EPS, ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")),
    (Keys.Attention.SLIDING_WINDOW, ("sliding_window",)),
    (Keys.Attention.CLAMP_KQV, ("clip_qkv",)),
    (Keys.LLM.LOGIT_SCALE, ("logit_scale",)),
    (Keys.LLM.ATTN_LOGIT_SOFTCAPPING, ("attn_logit_softcapping",)),
    (Keys.LLM.FINAL_LOGIT_SOFTCAPPING, ("final_logit_softcapping",)),
    (Keys.LLM.EXPERT_COUNT, ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")),
    (Keys.LLM.EXPERT_USED_COUNT, ("num_experts_per_tok", "moe_k", "moe_topk")),
    (Keys.LLM.EXPERT_SHARED_COUNT, ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")),
    (Keys.LLM.EXPERT_WEIGHTS_NORM, ("norm_topk_prob",)),
    (Keys.LLM.EXPERT_WEIGHTS_SCALE, ("routed_scaling_factor", "route_scale")),
    (Keys.LLM.EXPERT_GROUP_COUNT, ("n_group",)),
    (Keys.LLM.EXPERT_GROUP_USED_COUNT, ("topk_group",)),
    (Keys.LLM.LEADING_DENSE_BLOCK_COUNT, ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")),
    (Keys.LLM.USE_PARALLEL_RESIDUAL, ("use_parallel_residual",)),
)


def write_tiny(path: Path, architecture: str, kind: str = "F32", extra: str = "") -> PreTrainedModel:
    """Writes a file of random weights, its matrices in `kind`; returns the model in float32.

    With `extra` it has a vector of that name besides.
    """
    tiny = TINY[architecture]
    config = tiny_config(tiny.family)
    for name, value in tiny.settings.items():
        setattr(config, name, value)
    model = tiny_model(type(config)(**config.to_dict()))
    config = model.config
    config.allow_global_per_layer_attribute_access = True
    writer, types = GGUFWriter(path, architecture), GGMLQuantizationType
    for key, value in _metadata(config, architecture, tiny).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            number = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if type(value) is int else number)
    for name in ("alpha_p", "alpha_n", "beta", "eps"):  # of an activation with learned parameters
        numbers = [float(value) for key, value in model.state_dict().items() if key.endswith(f"act_fn.{name}")]
        if numbers:
            writer.add_array(f"xielu.{name}", numbers)
    add_byte_level(writer, tokenizer().backend_tokenizer, "gpt-2")
    for name, values in _tensors(model, architecture):
        packed = values.ndim > 1 and kind != "F32"
        writer.add_tensor(name, pack(values, kind) if packed else values, raw_dtype=types[kind] if packed else None)
    if extra:
        writer.add_tensor(extra, np.ones(config.hidden_size, np.float32))
    finish(writer)
    return model


def _metadata(config: PretrainedConfig, architecture: str, tiny: Tiny) -> Settings:
    fields: Settings = {}
    for key, names in _KEYS:
        value = next((field_value for name in names if (field_value := getattr(config, name, None)) is not None), None)
        if value is not None and not (isinstance(value, list) or value is False):
            fields[key.format(arch=architecture)] = value
    fields.setdefault(f"{architecture}.feed_forward_length", 4 * config.hidden_size)
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    if full:
        fields[f"{architecture}.rope.freq_base"] = float(full["rope_theta"])
        fields[f"{architecture}.rope.dimension_count"] = int(head * full.get("partial_rotary_factor", 1.0))
    if full.get("rope_type") == "yarn":
        fields[f"{architecture}.rope.scaling.type"] = "yarn"
        fields[f"{architecture}.rope.scaling.factor"] = full["factor"]
        fields[f"{architecture}.rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        if "llama_4_scaling_beta" in full:
            fields[f"{architecture}.attention.temperature_scale"] = full["llama_4_scaling_beta"]
            fields[f"{architecture}.rope.scaling.yarn_log_multiplier"] = full["mscale_all_dim"]
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" in kinds:
        pattern = [kind == "sliding_attention" for kind in kinds]
        fields[f"{architecture}.attention.sliding_window_pattern"] = pattern
    elif kinds:
        fields.pop(f"{architecture}.attention.sliding_window", None)
    return fields | {f"{architecture}.{key}": value for key, value in tiny.metadata(config).items()}


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, Array]]:
    number = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(MODEL_ARCH(number), model.config.num_hidden_layers)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, tensor in _split(model, architecture):
        if tied and name == "lm_head.weight":
            continue
        stored = name if name.endswith(".scale") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise KeyError(f"the package has no name for {name} in {architecture}")
        if not stored.endswith((".weight", ".bias", ".scale")):
            stored += ".weight"
        yield stored, _converted(stored, tensor, model.config, architecture).contiguous().numpy()
    # Published files also have the keys and values of layers that take them from another layer.
    for layer in range(model.config.num_hidden_layers)[::-1][: getattr(model.config, "num_kv_shared_layers", 0)]:
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            yield f"blk.{layer}.{name}.weight", np.ones(model.config.hidden_size, np.float32)
    yield from _factors(model.config)
    if architecture == "gemma4":
        full = model.config.rope_parameters["full_attention"]["partial_rotary_factor"]
        pairs = model.config.per_layer_config[model.config.num_hidden_layers - 1].head_dim // 2
        turning = int(pairs * full)
        yield "rope_freqs.weight", np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)


def _split(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors under names that the package knows, with gates and values of experts apart."""
    stacked: dict[str, list[Tensor]] = {}
    packed: dict[str, list[Tensor]] = {}
    for full, value in model.state_dict().items():
        name, tensor = full, value.float()
        for ours, theirs in _RENAMED.items():
            name = name.replace(ours, theirs)
        if match := re.search(r"(.+_layernorm)\.norms\.\d+\.weight$|(.+projections)\.\d+\.weight$", name):
            stacked.setdefault(f"{match[1] or match[2]}.weight", []).append(tensor)
        elif architecture == "gemma4" and name.endswith("experts.gate_up_proj"):
            yield name, tensor
        elif name.endswith(("experts.gate_up_proj", "input_linear.weight", "experts.gate_up_proj_bias")):
            yield from _gates(name, tensor, architecture)
        elif ".act_fn." in name:
            pass
        elif match := re.search(r"\.(\d+)\.router\.(scale|per_expert_scale)$", name):
            yield f"blk.{match[1]}.{'ffn_gate_inp' if match[2] == 'scale' else 'ffn_down_exps'}.scale", tensor
        elif architecture == "qwen" and (match := re.search(r"\.(\d+)\.self_attn\.[qkv]_proj\.(\w+)$", name)):
            packed.setdefault(f"transformer.h.{match[1]}.attn.c_attn.{match[2]}", []).append(tensor)
        elif name.endswith("kv_b_proj.weight") and architecture == "deepseek2":
            yield from _latent_parts(name, tensor, model.config)
        elif name.endswith("experts.down_proj_bias"):
            yield name.removesuffix("_bias") + ".bias", tensor
        elif architecture in _TRANSPOSED_EXPERTS and name.endswith("experts.down_proj"):
            yield name, tensor.transpose(1, 2)
        else:
            yield name, tensor
    for name, parts in packed.items():
        yield name, torch.cat(parts)
    for name, parts in stacked.items():
        yield name, torch.stack(parts)


def _gates(name: str, tensor: Tensor, architecture: str) -> Iterator[tuple[str, Tensor]]:
    stem, kind = name.removesuffix(".weight").removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    stem = stem.replace("block_sparse_moe.input_linear", "mlp.experts.gate_up_proj")
    stem = stem.replace("shared_mlp.input_linear", "mlp.shared_expert.gate_up_proj")
    if architecture == "llama4":
        gate, up = tensor.transpose(1, 2).chunk(2, dim=1)
    elif architecture == "gpt-oss":
        gate, up = tensor[..., ::2], tensor[..., 1::2]
        if kind == "weight":
            gate, up = gate.transpose(1, 2), up.transpose(1, 2)
    else:
        gate, up = tensor.chunk(2, dim=max(0, tensor.dim() - 2))
    yield stem.replace("gate_up_proj", "gate_proj") + f".{kind}", gate
    yield stem.replace("gate_up_proj", "up_proj") + f".{kind}", up


def _latent_parts(name: str, tensor: Tensor, config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    by_head = tensor.view(heads, -1, config.kv_lora_rank)
    keys, values = torch.split(by_head, [nope, config.v_head_dim], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _converted(stored: str, tensor: Tensor, config: PretrainedConfig, architecture: str) -> Tensor:
    """A tensor as the converter writes it."""
    if architecture in _INTERLEAVED and (match := re.search(r"attn_([qk])\.", stored)):
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        pairs = tensor.view(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)
    if architecture in {"gemma", "gemma2", "gemma3", "nemotron"} and stored.endswith("norm.weight"):
        return tensor + 1
    if architecture == "gpt2" and re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", stored):
        return tensor.t()
    if architecture == "gptneox" and "attn_qkv" in stored:
        apart = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in apart.unbind(1)])
    if "ffn_gate_inp_shexp" in stored:
        return tensor[0]
    return tensor


def _factors(config: PretrainedConfig) -> Iterator[tuple[str, Array]]:
    """Yields the divisors of the frequencies in place of llama3's parameters, from the formula of Llama 3.1."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (torch.arange(0, head, 2).float() / head):
        turns = rope["original_max_position_embeddings"] * float(frequency) / (2 * np.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1.0 / ((1.0 - smooth) / rope["factor"] + smooth))
    yield "rope_freqs.weight", np.array(factors, np.float32)
