"""Writes the inputs of both servers of `vllm_cpu`: a model of random weights and a file of prompts."""

import json
import lzma
import random
import re
from collections.abc import Callable, Mapping
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

_TOKENIZER = Path(__file__).parents[2] / "data" / "gpt2.json.xz"
END = "<|endoftext|>"
"""The token of GPT-2 that ends a text."""
_WORD = re.compile("Ġ[a-z]+")
"""A token of GPT-2 that is a space and a word."""


def tokenizer() -> Tokenizer:
    """Returns GPT-2's, which is byte-level, so that every id has a text."""
    loaded: Tokenizer = Tokenizer.from_str(lzma.decompress(_TOKENIZER.read_bytes()).decode())
    return loaded


def write_model(name: str, folder: Path) -> None:
    """Writes the model `name` of `MODELS` with random weights in bf16, and its tokenizer."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token=END, eos_token=END, pad_token=END)
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


def text_drawer(draw: random.Random) -> Callable[[int], str]:
    """Returns a function that draws a text of a given number of tokens.

    Texts are words of GPT-2's vocabulary, each a token. The vocabulary is ordered by frequency, and words are drawn by
    Zipf's law, so that they repeat as in prose.
    """
    ids = tokenizer().get_vocab()
    words = [token.replace("Ġ", " ") for token in sorted(ids, key=ids.__getitem__) if _WORD.fullmatch(token)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    return lambda tokens: "".join(draw.choices(words, weights, k=tokens))


def write_prompts(file: Path, count: int) -> None:
    """Writes lines of {"prompt", "output_tokens"} with the lengths of real conversations."""
    draw = random.Random(42)
    text = text_drawer(draw)
    lengths = draw.sample(sharegpt_lengths(), count)
    lines = [json.dumps({"prompt": text(tokens), "output_tokens": output}) for tokens, output in lengths]
    file.write_text("\n".join(lines) + "\n")
