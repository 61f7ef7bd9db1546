"""Writes a GGUF file with packed experts and random weights, for `chat --model FILE --against llama.cpp=URL`.

It has the shape of Qwen3-30B-A3B with half of its features and eight of its 48 layers: 128 experts per layer, of which
a token chooses 8, altogether 0.95 billion parameters. Types are those of llama.cpp's `Q4_K_M`: the file has 0.59 GB.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

from pagewire.bench.cpu_step import VOCABULARY
from tools.experiments.other_servers.vllm.inputs import END, tokenizer

WIDTH, INNER, LAYERS, EXPERTS, CHOSEN = 1024, 256, 8, 128, 8
HEADS, KV_HEADS, HEAD_SIZE = 16, 2, 128
CONTEXT = 8192
SPREAD = 0.03
"""Standard deviation of the weights, around 0."""
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"

Values = npt.NDArray[Any]
Stored = tuple[str, Values, GGMLQuantizationType]
"""Name, values and type of a tensor."""


def main(arguments: list[str]) -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments packed_experts", description=__doc__)
    parser.add_argument("file", type=Path, help="path of the file, which ends in .gguf")
    options = parser.parse_args(arguments)
    write_model(options.file)
    print(f"{options.file}: {options.file.stat().st_size / 1e9:.2f} GB")
    return 0


def write_model(file: Path, layers: int = LAYERS, experts: int = EXPERTS) -> None:
    """Writes the model with so many layers, and experts in each."""
    writer = GGUFWriter(file, "qwen3moe")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(CHOSEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_chat_template(TEMPLATE)
    _add_vocabulary(writer)
    for name, values, kind in _tensors(layers, experts):
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(layers: int, experts: int) -> Iterator[Stored]:
    """Yields all tensors."""
    random = np.random.default_rng(0)
    plain, small, large = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
    heads, kv_heads = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE

    def packed(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> Stored:
        return f"{name}.weight", _six_bits(random, shape) if kind is large else _four_bits(random, shape), kind

    def ones(name: str, size: int) -> Stored:
        return f"{name}.weight", np.ones(size, np.float32), plain

    yield packed("token_embd", (VOCABULARY, WIDTH), small)
    yield packed("output", (VOCABULARY, WIDTH), large)
    yield ones("output_norm", WIDTH)
    for layer in range(layers):
        block = f"blk.{layer}"
        # llama.cpp stores the values and the last matrices of every third layer and of the last one in six bits.
        best = large if layer % 3 == 0 or layer == layers - 1 else small
        yield packed(f"{block}.attn_q", (heads, WIDTH), small)
        yield packed(f"{block}.attn_k", (kv_heads, WIDTH), small)
        yield packed(f"{block}.attn_v", (kv_heads, WIDTH), best)
        yield packed(f"{block}.attn_output", (WIDTH, heads), small)
        yield packed(f"{block}.ffn_gate_exps", (experts, INNER, WIDTH), small)
        yield packed(f"{block}.ffn_up_exps", (experts, INNER, WIDTH), small)
        yield packed(f"{block}.ffn_down_exps", (experts, WIDTH, INNER), best)
        yield f"{block}.ffn_gate_inp.weight", random.normal(0, SPREAD, (experts, WIDTH)).astype(np.float32), plain
        yield from (ones(f"{block}.{name}", WIDTH) for name in ("attn_norm", "ffn_norm"))
        yield from (ones(f"{block}.{name}", HEAD_SIZE) for name in ("attn_q_norm", "attn_k_norm"))


def _four_bits(random: np.random.Generator, shape: tuple[int, ...]) -> Values:
    """Returns random blocks of Q4_K: a scale, a scale of the minima, their multiples and codes of 4 bits."""
    blocks = _blocks(random, shape, 144)
    scale = np.float16(SPREAD / 258)  # 258: the standard deviation of 6-bit multiples times codes, less the minima
    blocks[..., :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    return _rows(blocks)


def _six_bits(random: np.random.Generator, shape: tuple[int, ...]) -> Values:
    """Returns random blocks of Q6_K: codes of 6 bits, multiples of the scale, and the scale."""
    blocks = _blocks(random, shape, 210)
    scale = np.float16(SPREAD / 1365)  # 1365: the standard deviation of 8-bit multiples times codes
    blocks[..., 208:] = np.array([scale], np.float16).view(np.uint8)
    return _rows(blocks)


def _blocks(random: np.random.Generator, shape: tuple[int, ...], size: int) -> npt.NDArray[np.uint8]:
    """Returns random bytes: blocks of `size` bytes for each 256 numbers of a row."""
    return random.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), np.uint8)


def _rows(blocks: npt.NDArray[np.uint8]) -> Values:
    return blocks.reshape(*blocks.shape[:-2], -1)


def _add_vocabulary(writer: GGUFWriter) -> None:
    """Adds GPT-2's tokens, and unused ones up to `VOCABULARY`."""
    backend = tokenizer()
    known = backend.get_vocab_size()
    tokens = [backend.id_to_token(token) for token in range(known)]
    kinds = [TokenType.CONTROL if token == END else TokenType.NORMAL for token in tokens]
    unused = [f"[unused{number}]" for number in range(VOCABULARY - known)]
    merges = json.loads(backend.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([*kinds, *[TokenType.UNUSED] * len(unused)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokens.index(END))
    writer.add_bos_token_id(tokens.index(END))
