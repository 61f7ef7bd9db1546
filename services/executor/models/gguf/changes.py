"""Undoes what llama.cpp's converter does to tensors of Hugging Face's checkpoints, besides giving them other names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
"""A config.json."""
Parts = tuple[Tensor, ...]
Change = Callable[..., Tensor]
"""Takes stored tensors and, as `config`, config.json; returns the tensor of the checkpoint."""


def _minus_one(parts: Parts, config: Config) -> Tensor:
    """Returns the weights of a norm whose family adds one to them, as the converter has done."""
    del config
    return parts[0].float() - 1


def _transposed(parts: Parts, config: Config) -> Tensor:
    del config
    return parts[0].t()


def _by_head(parts: Parts, config: Config) -> Tensor:
    """Returns rows of queries, keys and values in the order [head, 3, d], which are stored as [3, head, d]."""
    apart = parts[0].view(3, int(config["num_attention_heads"]), -1, *parts[0].shape[1:])
    return apart.transpose(0, 1).reshape(parts[0].shape)


def _as_row(parts: Parts, config: Config) -> Tensor:
    del config
    return parts[0][None] if parts[0].dim() == 1 else parts[0]


def _joined(parts: Parts, config: Config) -> Tensor:
    """Returns gates before values: of experts [count, rows, columns], or rows of one matrix."""
    del config
    return torch.cat(parts, dim=max(0, parts[0].dim() - 2))


def _alternating(parts: Parts, config: Config) -> Tensor:
    """Returns gates and values of experts in turn: [count, columns, 2 rows], or biases [count, 2 rows]."""
    del config
    pairs = torch.stack(parts, dim=2).flatten(1, 2)
    return pairs if parts[0].dim() == 2 else pairs.transpose(1, 2)


def _columns(parts: Parts, config: Config) -> Tensor:
    """Returns matrices of experts [count, columns, rows], which are stored as [count, rows, columns]."""
    return _joined(parts, config).transpose(1, 2)


def _part_of_qkv(parts: Parts, config: Config, part: int) -> Tensor:
    """Returns the rows of queries, keys or values."""
    head, heads, kv_heads = (int(config[key]) for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    return torch.split(parts[0], [heads * head, kv_heads * head, kv_heads * head])[part]


def _latent(parts: Parts, config: Config) -> Tensor:
    """Returns the up-projection of keys and values, whose parts are stored per head, that of keys transposed."""
    del config
    return torch.cat((parts[0].transpose(1, 2), parts[1]), dim=1).flatten(0, 1)


_NORMS = r"norm\.weight$"
CHANGES: Mapping[str, Mapping[str, Change]] = {
    "gemma": {_NORMS: _minus_one},
    "gemma2": {_NORMS: _minus_one},
    "gemma3": {_NORMS: _minus_one},
    "gpt2": {r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$": _transposed},
    "gptneox": {r"\.attn_qkv\.": _by_head},
    "nemotron": {_NORMS: _minus_one},
    "qwen2moe": {r"\.ffn_gate_inp_shexp\.": _as_row},
}
"""Expressions for stored names, and what becomes of such tensors, by architecture."""

QKV = "attn_qkv"
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps")
JOINED: Mapping[str | None, tuple[tuple[str, tuple[str, ...], Change], ...]] = {
    "gpt-oss": (
        (r"\.experts\.gate_up_proj(_bias)?$", _EXPERTS, _alternating),
        (r"\.experts\.down_proj$", ("ffn_down_exps",), _columns),
        (r"\.experts\.down_proj_bias$", ("ffn_down_exps",), _joined),
    ),
    "llama4": (
        (r"\.experts\.gate_up_proj$", _EXPERTS, _columns),
        (r"\.experts\.down_proj$", ("ffn_down_exps",), _columns),
    ),
    None: (
        (r"\.experts\.gate_up_proj$", _EXPERTS, _joined),
        (r"\.experts\.down_proj$", ("ffn_down_exps",), _joined),
        (r"\.block_sparse_moe\.input_linear\.", _EXPERTS, _joined),
        (r"\.shared_mlp\.input_linear\.", ("ffn_gate_shexp", "ffn_up_shexp"), _joined),
        (r"\.gate_up_proj\.", ("ffn_gate", "ffn_up"), _joined),
        (r"\.q_proj\.", (QKV,), partial(_part_of_qkv, part=0)),
        (r"\.k_proj\.", (QKV,), partial(_part_of_qkv, part=1)),
        (r"\.v_proj\.", (QKV,), partial(_part_of_qkv, part=2)),
        (r"\.kv_b_proj\.", ("attn_k_b", "attn_v_b"), _latent),
    ),
}
"""Expressions for names of a checkpoint, the tensors of a layer that such a tensor is made from, and how, by
architecture; None: all others."""

CONSTANTS: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]] = {
    "apertus": {r"\.act_fn\.(alpha_\w)$": (r"xielu.\1", (1,)), r"\.act_fn\.(beta|eps)$": (r"xielu.\1", ())}
}
"""Expressions for names of a checkpoint, the metadata that has such numbers of each layer, and the tensor's shape, by
architecture."""

NAMES: Mapping[str, Mapping[str, str]] = {
    "ernie4_5-moe": {r"\.gate\.moe_statics\.": ".moe_statics."},
    "gemma4": {
        r"^model\.layers\.(\d+)\.router\.scale$": r"blk.\1.ffn_gate_inp.scale",
        r"^model\.layers\.(\d+)\.router\.per_expert_scale$": r"blk.\1.ffn_down_exps.scale",
    },
    "granitemoe": {r"\.router\.weight$": ".router.layer.weight"},
}
"""Expressions for names of a checkpoint, and what the package has in their place, by architecture."""
