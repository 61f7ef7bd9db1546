"""Trains the model on a CPU, and continues from the last checkpoint when it is started again."""

import argparse
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.bundled_model.llama import Llama, Shape
from tools.bundled_model.measure import bits_per_byte
from tools.bundled_model.muon import Muon
from tools.bundled_model.texts import load_books
from tools.bundled_model.vocabulary import end_of_text, train_tokenizer


def batches(
    docs: Sequence[str], tokenizer: Tokenizer, tokens: int, lengths: Sequence[int], seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields inputs and targets without end; every epoch shuffles the documents and encodes them again."""
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


def make_optimisers(model: Llama, rate: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Returns Muon for the matrices of the layers, and AdamW for the embedding and the norms."""
    hidden = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    taken = {id(weight) for weight in hidden}
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    return [
        Muon(hidden, lr=rate, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


@dataclass
class Run:
    """The state of a training run, which a checkpoint stores."""

    model: Llama
    optimisers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Writes a checkpoint atomically."""
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
        """Restores the state of a checkpoint."""
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.step, self.seconds = saved["step"], saved["seconds"]


def train_step(run: Run, ids: Tensor, targets: Tensor, rate: float) -> float:
    """Runs one step at the given learning rate and returns the loss."""
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
    """Trains the model, continuing from the last checkpoint in the run folder."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    folder = Path(args.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    books = load_books()
    docs = [doc for book in books.values() for doc in book.training]
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
