"""Writes the inputs of the servers of `vllm_cpu` and `vllm_gpu`: models of random weights, and prompts."""

import json
import lzma
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pagewire.bench._common.loads import sharegpt_lengths
from pagewire.bench.cpu_step import SHAPES, VOCABULARY

MODELS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"model_type": "llama", **shape} for name, shape in SHAPES.items()},
    # Qwen1.5-MoE-A2.7B with a quarter of its features and a third of its layers.
    "moe300": {
        "model_type": "qwen2_moe",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 352,
        "shared_expert_intermediate_size": 1408,
    },
}
"""Sizes in config.json."""
_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "vocab_size": 128256,
}
GPU_SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": _LLAMA
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
"""config.json of the models of `vllm_gpu`, whose weights both servers draw."""

_TOKENIZER = Path(__file__).parents[1] / "data" / "gpt2.json.xz"
_END = "<|endoftext|>"
_WORD = re.compile("Ġ[a-z]+")
"""A token of GPT-2 that is a space and a word."""
_PLAIN = re.compile(r"[!-~Ġ]+|" + re.escape(_END))
"""A token that is a text of ASCII, or the end."""


def tokenizer() -> Tokenizer:
    """Returns GPT-2's, which is byte-level, so that every id has a text."""
    loaded: Tokenizer = Tokenizer.from_str(lzma.decompress(_TOKENIZER.read_bytes()).decode())
    return loaded


def write_model(name: str, folder: Path) -> None:
    """Writes the model `name` of `MODELS` with random weights in bf16, and its tokenizer."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token=_END, eos_token=_END, pad_token=_END)
    end = fast.eos_token_id
    config = AutoConfig.for_model(
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        **MODELS[name],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    fast.save_pretrained(folder)


def write_shape(name: str, folder: Path) -> None:
    """Writes the config.json of `name` in `GPU_SHAPES`, and a tokenizer in which each of its ids has a text of ASCII.

    A random model emits any id. One without a text of its own, such as half a letter, would delay or swallow a chunk.
    """
    config = GPU_SHAPES[name]
    content = json.loads(tokenizer().to_str())
    plain = {token: number for token, number in content["model"]["vocab"].items() if _PLAIN.fullmatch(token)}
    texts = {number: token for token, number in plain.items()}
    vocabulary = {texts.get(number, f"Ġx{number}x"): number for number in range(config["vocab_size"])}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in content["model"]["merges"]]
    content["model"]["merges"] = [[a, b] for a, b in pairs if {a, b, a + b} <= vocabulary.keys()]
    content["model"]["vocab"] = vocabulary
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token=_END, eos_token=_END, pad_token=_END
    )
    fast.save_pretrained(folder)
    ends = {"bos_token_id": fast.eos_token_id, "eos_token_id": fast.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config | ends, indent=2) + "\n")


def words() -> list[str]:
    """Returns the words of GPT-2's vocabulary, each a token with a space before it, the most frequent first."""
    ids = tokenizer().get_vocab()
    return [token.replace("Ġ", " ") for token in sorted(ids, key=ids.__getitem__) if _WORD.fullmatch(token)]


def write_prompts(file: Path, count: int, seed: int = 42) -> None:
    """Writes lines of {"prompt", "output_tokens"} with the lengths of real conversations.

    Prompts are words of GPT-2's vocabulary, each a token. The vocabulary is ordered by frequency, and words are drawn
    by Zipf's law, so that they repeat as in prose.
    """
    draw = random.Random(seed)
    vocabulary = words()
    weights = [1 / rank for rank in range(1, len(vocabulary) + 1)]
    lines = []
    for tokens, output in draw.sample(sharegpt_lengths(), count):
        prompt = "".join(draw.choices(vocabulary, weights, k=tokens))
        lines.append(json.dumps({"prompt": prompt, "output_tokens": output}))
    file.write_text("\n".join(lines) + "\n")
