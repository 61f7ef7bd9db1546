"""Trains, exports and measures the small Llama model that ships inside the package.

The whole recipe is in this file: the books, the split, the tokenizer, the model, the optimiser and the
measurement. It runs on an ordinary CPU. The usual sequence is::

    python models/train.py train --run-dir /tmp/bundled-run
    python models/train.py export --run-dir /tmp/bundled-run
    python models/train.py evaluate
    python models/train.py sample

``train`` writes a checkpoint at regular intervals and goes on from it when it is started again.
``export`` writes a Hugging Face folder and checks it against ``transformers``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
BOOKS = HERE / "books"
BUNDLED = HERE.parent / "pagewire" / "bundled"

EOS = "<|endoftext|>"
HELD_OUT_SHARE = 0.05
SHORTEST_DOCUMENT = 600
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PROMPTS = ("Once upon a time", "Sherlock Holmes", "The little rabbit")


# ---------------------------------------------------------------------------------------------- books


def clean(text: str) -> str:
    """Makes a book plain: straight quotes, no markup, and one line per paragraph.

    Verse keeps its lines. A paragraph counts as verse when a later line of it is indented, or when all
    of its lines are short.
    """
    text = re.sub(r"^\[.*?\]\s*", "", text)
    text = text.translate(str.maketrans("‘’“”", "''\"\"", "_"))
    paragraphs = []
    for block in re.split(r"\n[ \t]*\n", text):
        raw = [line.rstrip() for line in block.split("\n") if line.strip()]
        lines = [re.sub(r"\s+", " ", line.strip()) for line in raw]
        if not lines:
            continue
        verse = any(line.startswith("  ") for line in raw[1:]) or all(len(line) < 50 for line in lines)
        paragraphs.append(("\n" if verse else " ").join(lines))
    return "\n\n".join(paragraphs)


def documents(book: str) -> list[str]:
    """Splits a book into stories or chapters, which stand three or more blank lines apart."""
    pieces: list[str] = []
    held = ""
    for part in re.split(r"\n{4,}", book):
        piece = clean(part)
        if not piece:
            continue
        piece = held + "\n\n" + piece if held else piece
        held = ""
        if len(piece) < SHORTEST_DOCUMENT:
            held = piece
        else:
            pieces.append(piece)
    if held:
        pieces.append(held)
    return pieces


def split_book(book: str) -> tuple[list[str], list[str]]:
    """Returns the training documents of a book and the held-out ones, which are its last 5 % or so.

    The cut falls between two documents where one ends near that point, else between two paragraphs.
    """
    docs = documents(book)
    total = sum(len(doc) for doc in docs)
    wanted = (1.0 - HELD_OUT_SHARE) * total
    seen, best, best_gap = 0, -1, 0.02 * total
    for index, doc in enumerate(docs):
        if abs(seen - wanted) < best_gap:
            best, best_gap = index, abs(seen - wanted)
        seen += len(doc)
    if best > 0:
        return docs[:best], docs[best:]
    seen = 0
    for index, doc in enumerate(docs):
        if seen + len(doc) > wanted:
            cut = doc.index("\n\n", int(wanted - seen))
            return [*docs[:index], doc[:cut]], [doc[cut:].strip(), *docs[index + 1 :]]
        seen += len(doc)
    raise ValueError("the book has no text")


def load_books() -> dict[str, tuple[list[str], list[str]]]:
    """Reads every book: its name, its training documents and its held-out documents."""
    books = {}
    for path in sorted(BOOKS.glob("*.txt.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            books[path.name.removesuffix(".txt.xz")] = split_book(file.read())
    return books


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer that encodes any text and gives the same text back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """Returns the id of the token that ends a document."""
    eos = tokenizer.token_to_id(EOS)
    if eos is None:
        raise ValueError(f"the tokenizer has no token {EOS}")
    return eos


# ---------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, under the names of a Llama ``config.json``."""

    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    """Scales every vector to unit root mean square."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding in the half-split layout that ``transformers`` uses."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attends over the earlier positions of the same row."""
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return cast("Tensor", self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)))


class FeedForward(nn.Module):
    """The gated SiLU feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transforms every position by itself."""
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One transformer layer, with dropout on what it adds to the residual stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Adds attention and feed-forward to the residual stream."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class Decoder(nn.Module):
    """The part of the model that ``transformers`` names ``model``."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = dropout
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-steps)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids to the final hidden states."""
        x = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        cos, sin = cast("Tensor", self.cos)[: ids.shape[1]], cast("Tensor", self.sin)[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast("Tensor", self.norm(x))


class Llama(nn.Module):
    """A small Llama with tied embeddings and dropout; its weights carry the ``transformers`` names."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, dropout)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / math.sqrt(2 * shape.num_hidden_layers) if deep else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids to logits."""
        return F.linear(self.model(ids), self.model.embed_tokens.weight)


# ------------------------------------------------------------------------------------------- training


class Muon(torch.optim.Optimizer):
    """Momentum whose update for a matrix is replaced by the nearest orthogonal matrix.

    The scale ``0.2 * sqrt(max(rows, columns))`` gives updates the size that AdamW's have, so one
    learning rate serves both optimisers.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the weights; matrices of one size go through the iteration together."""
        for group in self.param_groups:
            sizes: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                sizes.setdefault(weight.shape, []).append(weight)
            for size, weights in sizes.items():
                gradients = []
                for weight in weights:
                    state = self.state[weight]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(weight)
                    gradient = cast("Tensor", weight.grad)
                    state["momentum"].lerp_(gradient, 1 - group["momentum"])
                    gradients.append(torch.lerp(gradient, state["momentum"], group["momentum"]))
                scale = group["lr"] * 0.2 * math.sqrt(max(size))
                for weight, update in zip(weights, orthogonal(torch.stack(gradients)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def orthogonal(x: Tensor) -> Tensor:
    """Approximates the nearest orthogonal matrices with five Newton-Schulz steps."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def batches(
    docs: Sequence[str], tokenizer: Tokenizer, tokens: int, lengths: Sequence[int], seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields inputs and targets without end; every pass shuffles the documents and encodes them anew."""
    eos = end_of_text(tokenizer)
    epoch, rest = 0, torch.zeros(0, dtype=torch.long)
    while True:
        chance = random.Random(f"{seed}/{epoch}")
        order = list(docs)
        chance.shuffle(order)
        ids = [token for doc in tokenizer.encode_batch(order) for token in (eos, *doc.ids)]
        rest = torch.cat((rest, torch.tensor(ids)))
        while len(rest) > tokens:
            length = chance.choice(lengths)
            yield rest[:tokens].view(-1, length), rest[1 : tokens + 1].view(-1, length)
            rest = rest[tokens:]
        epoch += 1


def token_losses(model: nn.Module, ids: Sequence[int], window: int, stride: int) -> Tensor:
    """Returns the loss of every token after the first, in nats.

    Windows overlap, so that apart from the start every token has at least ``window - stride`` tokens
    before it.
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
    """Returns held-out text as token ids, each document between end-of-text tokens, and its size in bytes."""
    eos = end_of_text(tokenizer)
    ids = [eos]
    for doc in docs:
        ids += [*tokenizer.encode(doc).ids, eos]
    return ids, sum(len(doc.encode()) for doc in docs)


def bits_per_byte(
    model: nn.Module,
    tokenizer: Tokenizer,
    books: dict[str, tuple[list[str], list[str]]],
    window: int,
    stride: int,
) -> dict[str, float]:
    """Measures held-out bits per byte for every book and, under ``all``, for all of them together."""
    model.eval()
    result, nats, size = {}, 0.0, 0
    for name, (_, held_out) in books.items():
        ids, count = held_out_ids(tokenizer, held_out)
        loss = float(token_losses(model, ids, window, stride).sum())
        result[name] = loss / math.log(2) / count
        nats, size = nats + loss, size + count
    result["all"] = nats / math.log(2) / size
    return result


def make_optimisers(model: Llama, rate: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Gives the matrices of the layers to Muon, and the embedding and the norms to AdamW."""
    hidden = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    taken = {id(weight) for weight in hidden}
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    return [
        Muon(hidden, lr=rate, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


@dataclass
class Run:
    """What a checkpoint holds."""

    model: Llama
    optimisers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Writes a checkpoint so that a stopped run leaves the old one or the new one."""
        temporary = path.with_suffix(".tmp")
        value = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "shape": asdict(self.model.shape),
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(value, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Goes back to the state of a checkpoint."""
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.step, self.seconds = saved["step"], saved["seconds"]


def train_step(run: Run, ids: Tensor, targets: Tensor, rate: float) -> float:
    """Takes one step at the given learning rate and returns the loss."""
    run.model.train()
    loss = F.cross_entropy(run.model(ids).flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimiser in run.optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad()
    return loss.item()


def train(args: argparse.Namespace) -> None:
    """Trains the model, and goes on from the last checkpoint in the run folder."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    folder = Path(args.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    books = load_books()
    docs = [doc for train_docs, _ in books.values() for doc in train_docs]
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(docs, args.vocab_size).save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    model = Llama(Shape(vocab_size=tokenizer.get_vocab_size()), args.dropout)
    run = Run(model, make_optimisers(model, args.lr, args.weight_decay))
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        run.load(checkpoint)
        torch.manual_seed(args.seed + run.step)
    parameters, size = sum(map(torch.numel, model.parameters())), sum(len(doc.encode()) for doc in docs)
    total = sum(len(row.ids) for row in tokenizer.encode_batch(docs))
    bits = total / size / math.log(2)
    print(f"{parameters} parameters, {len(docs)} documents, {size} bytes, {total} tokens, step {run.step}")

    first, average, began, before = run.step, 0.0, time.monotonic(), run.seconds
    stream = batches(docs, tokenizer, args.batch_tokens, args.lengths, args.seed)
    for step, (ids, targets) in enumerate(itertools.islice(stream, args.steps), start=1):
        if step <= first:
            continue
        progress = max((step - 1) / args.steps, run.seconds / (60 * args.minutes))
        rate = args.lr * min(1.0, step / (0.03 * args.steps)) * max(0.0, 1.0 - progress)
        loss = train_step(run, ids, targets, rate)
        average = 0.95 * average + 0.05 * loss if average else loss
        run.step, run.seconds = step, before + time.monotonic() - began
        if step % 20 == 0:
            print(
                f"step {step}/{args.steps} epoch {step * args.batch_tokens / total:.2f}"
                f" loss {average:.3f} ({average * bits:.3f} bits per byte)"
                f" {(step - first) * args.batch_tokens / (run.seconds - before):.0f} tokens/s {run.seconds:.0f} s",
                flush=True,
            )
        last = step == args.steps or run.seconds > 60 * args.minutes
        if last or step % args.save_every == 0:
            run.save(checkpoint)
            print(f"step {step} held-out {bits_per_byte(model, tokenizer, books, 512, 256)['all']:.4f}", flush=True)
        if last:
            break


# --------------------------------------------------------------------------------- export and measure


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_exported(folder: Path) -> tuple[nn.Module, Tokenizer]:
    """Loads an exported folder with ``transformers``, in float32."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return cast("nn.Module", model).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def export(args: argparse.Namespace) -> None:
    """Writes the checkpoint as a Hugging Face folder and checks it against this file's own model."""
    run, out = Path(args.run_dir), Path(args.out)
    saved = torch.load(run / "checkpoint.pt", weights_only=True, map_location="cpu")
    shape = Shape(**saved["shape"])
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in saved["model"].items()}
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    eos = end_of_text(tokenizer)

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        write_json(made / "config.json", config)
        write_json(made / "generation_config.json", {"eos_token_id": eos, "do_sample": False})
        tokenizer.save(str(made / "tokenizer.json"))
        write_json(
            made / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "add_bos_token": False,
                "bos_token": None,
                "eos_token": EOS,
                "unk_token": None,
                "pad_token": None,
                "clean_up_tokenization_spaces": False,
                "model_max_length": shape.max_position_embeddings,
            },
        )

        mine = Llama(shape).eval()
        mine.load_state_dict({name: weight.float() for name, weight in weights.items()})
        theirs, _ = load_exported(made)
        ids = torch.randint(0, shape.vocab_size, (2, shape.max_position_embeddings))
        with torch.no_grad():
            difference = float((mine(ids) - theirs(ids).logits).abs().max())
        print(f"largest difference to the logits of transformers: {difference:.2e}")
        if difference > 1e-4:
            raise SystemExit("the exported model differs from the trained one")

        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(made.iterdir()):
            temporary = out / f".{path.name}.tmp"
            shutil.copyfile(path, temporary)
            os.replace(temporary, out / path.name)
    print(f"step {saved['step']} ({saved['seconds']:.0f} s of training) written to {out}")


def evaluate(args: argparse.Namespace) -> None:
    """Prints the held-out bits per byte of an exported folder."""
    torch.set_num_threads(args.threads)
    model, tokenizer = load_exported(Path(args.model))
    books = load_books()
    for name, value in bits_per_byte(model, tokenizer, books, args.window, args.stride).items():
        print(f"{name:28s} {value:.4f} bits per byte")
    longest = max((held_out for _, held_out in books.values()), key=lambda docs: sum(map(len, docs)))
    ids, _ = held_out_ids(tokenizer, longest)
    rows = [ids[start : start + 2048] for start in range(0, len(ids) - 2047, 2048)]
    losses = torch.stack([token_losses(model, row, 2048, 2048) for row in rows]).mean(dim=0)
    for start, end in ((0, 256), (256, 512), (512, 1024), (1024, 1536), (1536, 2047)):
        print(f"positions {start:4d} to {end:4d}: {float(losses[start:end].mean()):.3f} nats per token")


def sample(args: argparse.Namespace) -> None:
    """Prints continuations of a few prompts, greedy and sampled."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model, tokenizer = load_exported(Path(args.model))
    for prompt in args.prompts:
        for temperature in (0.0, args.temperature):
            ids = torch.tensor([tokenizer.encode(prompt).ids])
            chosen: dict[str, Any] = {"do_sample": False}
            if temperature:
                chosen = {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0}
            out = cast("Any", model).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens, pad_token_id=0, **chosen
            )
            print(f"--- temperature {temperature}\n{tokenizer.decode(out[0].tolist(), skip_special_tokens=False)}\n")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("train", help="train a model")
    command.set_defaults(call=train)
    command.add_argument("--run-dir", required=True, help="folder of the tokenizer and the checkpoint")
    command.add_argument("--steps", type=int, default=912)
    command.add_argument("--minutes", type=float, default=math.inf, help="end after this time, if steps remain")
    command.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a step")
    command.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 512, 512, 512, 2048], help="row lengths, drawn step by step"
    )
    command.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    command.add_argument("--weight-decay", type=float, default=0.5)
    command.add_argument("--dropout", type=float, default=0.1)
    command.add_argument("--vocab-size", type=int, default=3072)
    command.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--seed", type=int, default=1)

    command = commands.add_parser("export", help="write a Hugging Face folder")
    command.set_defaults(call=export)
    command.add_argument("--run-dir", required=True)
    command.add_argument("--out", default=BUNDLED)

    command = commands.add_parser("evaluate", help="measure held-out bits per byte")
    command.set_defaults(call=evaluate)
    command.add_argument("--model", default=BUNDLED)
    command.add_argument("--window", type=int, default=1024, help="tokens the model sees at once")
    command.add_argument("--stride", type=int, default=512, help="tokens between two windows")
    command.add_argument("--threads", type=int, default=2)

    command = commands.add_parser("sample", help="print continuations")
    command.set_defaults(call=sample)
    command.add_argument("prompts", nargs="*", default=list(PROMPTS))
    command.add_argument("--model", default=BUNDLED)
    command.add_argument("--tokens", type=int, default=100)
    command.add_argument("--temperature", type=float, default=0.7)
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    args.call(args)


if __name__ == "__main__":
    main()
