"""What both servers of `pagewire bench vllm_cpu` are given: models of random weights, prompts of ShareGPT's lengths."""

import json
import lzma
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pagewire.bench._simulation.loads import sharegpt_lengths
from pagewire.bench.cpu_step import SHAPES, VOCABULARY

_ROOT = Path(__file__).resolve().parents[1]
_TOKENIZER = _ROOT / "tests" / "data" / "tokenizers" / "gpt2.json.xz"
_BOOKS = _ROOT / "tools" / "bundled_model" / "books"
_END = "<|endoftext|>"


def tokenizer() -> Tokenizer:
    """GPT-2's: byte-level, so that every id has a text."""
    loaded: Tokenizer = Tokenizer.from_str(lzma.decompress(_TOKENIZER.read_bytes()).decode())
    return loaded


def write_model(name: str, folder: Path) -> None:
    """A Llama of the shape `name`, in bf16."""
    given = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token=_END, eos_token=_END, pad_token=_END)
    end = given.eos_token_id
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        **SHAPES[name],
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    given.save_pretrained(folder)


def write_prompts(file: Path, count: int, seed: int = 42) -> None:
    """Lines of {"prompt", "output_tokens"}: pieces of books, with lengths of real conversations."""
    draw = random.Random(seed)
    text = "\n".join(lzma.decompress(book.read_bytes()).decode() for book in sorted(_BOOKS.glob("*.xz")))
    speaks = tokenizer()
    ids = speaks.encode(text).ids
    lines = []
    for prompt, output in draw.sample(sharegpt_lengths(), count):
        start = draw.randrange(len(ids) - prompt)
        lines.append(json.dumps({"prompt": speaks.decode(ids[start : start + prompt]), "output_tokens": output}))
    file.write_text("\n".join(lines) + "\n")
