"""GGUF files as llama.cpp's converter would write them, by the writer of the package `gguf`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pagewire.services.executor.models.rope import read_rope, rotary_embedding
from pagewire.shared.models.gguf.reader import TENSOR_TYPES, TensorType
from tests.support.checkpoints import CONTEXT, EOS, VOCABULARY, checkpoint

KINDS = tuple(kind.name for kind in TENSOR_TYPES.values())
WRITABLE = tuple(kind for kind in KINDS if not kind.endswith("_K") and not kind.startswith(("IQ", "NVFP4")))
"""Types that the package can pack itself."""
TOKENS, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_VOCABULARY = {TOKENS, MERGES, "tokenizer.ggml.token_type"}

_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS"), (0,)),
    "IQ1_M": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
}
"""Where the float16 numbers of a block lie; all other bytes may be anything."""
_SCALE = {
    "Q2_K": 0.01,
    "Q3_K": 0.004,
    "Q4_K": 0.0008,
    "Q5_K": 0.0004,
    "Q6_K": 0.0002,
    "IQ1_S": 0.012,
    "IQ2_XXS": 0.002,
    "IQ2_XS": 0.002,
    "IQ2_S": 0.002,
    "IQ3_XXS": 0.001,
    "IQ3_S": 0.001,
    "IQ4_NL": 0.0015,
    "IQ4_XS": 0.0001,
}
"""Scales of blocks with which weights are as large as a model needs them."""
_MINIMA = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Ratio of the scale of the minima to the other scale, for numbers around zero."""
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

Tensors = Mapping[str, tuple[npt.NDArray[Any], str]]
"""By name in the file: the numbers or packed rows, and the type."""


def random_blocks(kind: str, count: int, seed: int = 0, scale: float = 0.05) -> npt.NDArray[np.uint8]:
    """[count, bytes] of blocks with anything in them, except that their float16 scales are finite and small."""
    random = np.random.default_rng(seed)
    size = block_of(kind).size
    blocks = random.integers(0, 256, (count, size), np.uint8)
    for offset in _SCALES[kind]:
        numbers = random.normal(0, scale, count).astype(np.float16)
        blocks[:, offset : offset + 2] = numbers[:, None].view(np.uint8)
    if kind == "IQ1_M":  # the float16 number is spread over the upper halves of four bytes
        blocks[:, 49::2] &= 0x0F
        blocks[:, 55] |= 0x20
    if kind == "NVFP4":
        blocks[:, :4] = blocks[:, :4] & 0x07 | 0x10
    if kind == "MXFP4":
        blocks[:, 0] = blocks[:, 0] & 0x07 | 0x78
    return blocks


def block_of(kind: str) -> TensorType:
    """The type of a name."""
    return next(tensor_type for tensor_type in TENSOR_TYPES.values() if tensor_type.name == kind)


def pack(values: npt.NDArray[np.float32], kind: str) -> npt.NDArray[Any]:
    """Numbers as the file stores them."""
    packed: npt.NDArray[Any] = quants.quantize(values, GGMLQuantizationType[kind])
    return packed


def from_checkpoint(name: str, path: Path, kind: str = "F32", **options: Any) -> Path:
    """A checkpoint of `tests.support.checkpoints` as GGUF, its matrices in `kind`; returns `path`."""
    folder = checkpoint(name)
    config = json.loads((folder / "config.json").read_bytes())
    architecture = _ARCHITECTURES[config["model_type"]]
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    tensors: dict[str, tuple[npt.NDArray[Any], str]] = {}
    for full, tensor in stored.items():
        values = tensor.float().numpy()
        if architecture == "llama" and (".q_proj." in full or ".k_proj." in full):
            heads = config["num_attention_heads"] if ".q_proj." in full else config["num_key_value_heads"]
            values = permute(values, heads)
        tensors[gguf_name(full)] = (pack(values, kind), kind) if values.ndim > 1 else (values, "F32")
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        plain, changed = _frequencies(config, rope | {"rope_type": "default"}), _frequencies(config, rope)
        tensors["rope_freqs.weight"] = plain / changed, "F32"
    write(path, architecture, config, tensors, Tokenizer.from_file(str(folder / "tokenizer.json")), **options)
    return path


def random_model(
    path: Path, architecture: str, kind: str, seed: int = 0, *, width: int = 256, rows: int = VOCABULARY
) -> Path:
    """A model of two layers with random blocks of `kind` and `rows` in the embedding; returns `path`."""
    heads, kv_heads = (2, 1) if architecture == "qwen3" else (8, 4)  # transformers takes heads of 128 for granted there
    random = np.random.default_rng(seed)
    config = {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    outputs = {"attn_q": width, "attn_k": width // 2, "attn_v": width // 2, "attn_output": width}
    outputs |= {"ffn_gate": width, "ffn_up": width, "ffn_down": width}

    def matrix(count: int) -> tuple[npt.NDArray[Any], str]:
        nonlocal seed
        seed += 1
        if kind in WRITABLE:
            return pack(random.normal(0, 0.1, (count, width)).astype(np.float32), kind), kind
        blocks = random_blocks(kind, count * width // block_of(kind).block, seed, _SCALE.get(kind, 0.0))
        if kind in _MINIMA:
            first, second = _SCALES[kind]
            scales = blocks[:, first : first + 2].copy().view(np.float16)
            blocks[:, second : second + 2] = (scales * np.float16(_MINIMA[kind])).view(np.uint8)
        return blocks.reshape(count, -1), kind

    def vector(size: int, around: float) -> tuple[npt.NDArray[Any], str]:
        return random.normal(around, 0.2, size).astype(np.float32), "F32"

    tensors = {"token_embd.weight": matrix(rows), "output.weight": matrix(rows)}
    tensors["output_norm.weight"] = vector(width, 1)
    for layer in range(2):
        tensors |= {f"blk.{layer}.{name}.weight": matrix(count) for name, count in outputs.items()}
        tensors |= {f"blk.{layer}.{name}.weight": vector(width, 1) for name in ("attn_norm", "ffn_norm")}
        if architecture == "qwen2":
            tensors |= {f"blk.{layer}.{name}.bias": vector(outputs[name], 0) for name in ("attn_q", "attn_k", "attn_v")}
        if architecture == "qwen3":
            norms = ("attn_q_norm", "attn_k_norm")
            tensors |= {f"blk.{layer}.{name}.weight": vector(width // heads, 1) for name in norms}
    tokenizer = Tokenizer.from_file(str(checkpoint("llama") / "tokenizer.json"))
    write(path, architecture, config, tensors, tokenizer)
    return path


def write(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    tensors: Tensors,
    tokenizer: Tokenizer,
    *,
    pre: str = "gpt-2",
    template: str = "",
    split: int = 0,
    tokens: Sequence[str] = (),
    kinds: Sequence[gguf.TokenType] = (),
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes a file; of a split model, with at most `split` tensors in each part, `path` is without `-0000n-of-`.

    Its tokens may be others than the tokenizer's, of other kinds.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head = _head(config)
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in {"linear", "yarn"}:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window") and config.get("model_type") == "mistral":
        writer.add_sliding_window(config["sliding_window"])
    add_byte_level(writer, tokenizer, pre)
    if tokens:
        writer.kv_data[0] = {key: value for key, value in writer.kv_data[0].items() if key not in _VOCABULARY}
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([])
    if template:
        writer.add_chat_template(template)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind, gguf.GGUFValueType.INT32 if isinstance(value, list) else None)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType[kind])
    finish(writer)


def finish(writer: GGUFWriter) -> None:
    """Writes everything to the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_byte_level(writer: GGUFWriter, tokenizer: Tokenizer, pre: str) -> None:
    """The vocabulary of a byte-level BPE; its added tokens are control tokens or, where not special, user-defined."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(token) or "" for token in range(tokenizer.get_vocab_size())]
    added = tokenizer.get_added_tokens_decoder()
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [kinds[added[token].special] if token in added else gguf.TokenType.NORMAL for token in range(len(tokens))]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    if EOS in tokens:
        writer.add_eos_token_id(tokens.index(EOS))
        writer.add_bos_token_id(tokens.index(EOS))


def add_sentencepiece(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    """The vocabulary of a SentencePiece BPE, with scores in place of merges, as its model file has it."""
    tokens = [tokenizer.id_to_token(token) or "" for token in range(tokenizer.get_vocab_size())]
    added = tokenizer.get_added_tokens_decoder()
    kinds = []
    for token, text in enumerate(tokens):
        if text == "<unk>":
            kinds.append(gguf.TokenType.UNKNOWN)
        elif token in added:
            kinds.append(gguf.TokenType.CONTROL if added[token].special else gguf.TokenType.USER_DEFINED)
        else:
            kinds.append(gguf.TokenType.BYTE if text.startswith("<0x") else gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(json.loads(tokenizer.to_str())["model"]["merges"]):
        ranks.setdefault(left + right, rank)
    writer.add_token_scores([-float(ranks.get(token, 0)) for token in tokens])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _head(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _frequencies(config: Mapping[str, Any], parameters: dict[str, Any]) -> npt.NDArray[Any]:
    frequencies: npt.NDArray[Any] = rotary_embedding(
        read_rope(parameters, 1e4, CONTEXT), _head(config)
    ).frequencies.numpy()
    return frequencies


def permute(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows as llama.cpp's converter orders them: pairs that turn together become neighbours."""
    split = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{ending}"
