"""Measures how well a model predicts the held-out text."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.bundled_model.texts import Book, load_books
from tools.bundled_model.vocabulary import end_of_text


def load_exported(folder: Path) -> tuple[nn.Module, Tokenizer]:
    """Loads an exported folder with `transformers`, in float32."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return cast("nn.Module", model).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_losses(model: nn.Module, ids: Sequence[int], window: int, stride: int) -> Tensor:
    """Returns the loss of every token after the first, in nats.

    Windows overlap, so that every token except the first ones has at least `window - stride` tokens of context.
    """
    losses, done, start = [], 1, 0
    while done < len(ids):
        end = min(start + window, len(ids))
        row = torch.tensor([ids[start:end]])
        with torch.no_grad():
            out = model(row)
        logits = out if isinstance(out, Tensor) else out.logits
        loss = F.cross_entropy(logits[0, :-1].float(), row[0, 1:], reduction="none")
        losses.append(loss[done - start - 1 :])
        done, start = end, start + min(stride, window - 1)
    return torch.cat(losses)


def held_out_ids(tokenizer: Tokenizer, docs: Sequence[str]) -> tuple[list[int], int]:
    """Returns the token ids of held-out text, with end-of-text tokens around each document, and its size in bytes."""
    eos = end_of_text(tokenizer)
    ids = [eos]
    for doc in docs:
        ids += [*tokenizer.encode(doc).ids, eos]
    return ids, sum(len(doc.encode()) for doc in docs)


def bits_per_byte(
    model: nn.Module,
    tokenizer: Tokenizer,
    books: Mapping[str, Book],
    window: int,
    stride: int,
) -> dict[str, float]:
    """Returns the held-out bits per byte of every book and, as `all`, of all books together."""
    model.eval()
    result, nats, size = {}, 0.0, 0
    for name, book in books.items():
        ids, count = held_out_ids(tokenizer, book.held_out)
        loss = float(token_losses(model, ids, window, stride).sum())
        result[name] = loss / math.log(2) / count
        nats, size = nats + loss, size + count
    result["all"] = nats / math.log(2) / size
    return result


def evaluate(args: argparse.Namespace) -> None:
    """Prints the held-out bits per byte of an exported folder."""
    torch.set_num_threads(args.threads)
    model, tokenizer = load_exported(Path(args.model))
    books = load_books()
    for name, value in bits_per_byte(model, tokenizer, books, args.window, args.stride).items():
        print(f"{name:28s} {value:.4f} bits per byte")
    longest = max((book.held_out for book in books.values()), key=lambda docs: sum(map(len, docs)))
    ids, _ = held_out_ids(tokenizer, longest)
    rows = [ids[start : start + 2048] for start in range(0, len(ids) - 2047, 2048)]
    if not rows:
        print("no held-out text is long enough to measure the loss by position")
        return
    losses = torch.stack([token_losses(model, row, 2048, 2048) for row in rows]).mean(dim=0)
    for start, end in ((0, 256), (256, 512), (512, 1024), (1024, 1536), (1536, 2047)):
        print(f"positions {start:4d} to {end:4d}: {float(losses[start:end].mean()):.3f} nats per token")
