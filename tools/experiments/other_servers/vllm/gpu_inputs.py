"""Writes the inputs of both servers of `vllm_gpu`: a model without weights, and the requests of each stage."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pagewire.bench._common.loads import sharegpt_lengths
from pagewire.bench.shapes import SHAPES
from tools.experiments.other_servers.vllm.inputs import END, text_drawer, tokenizer

MOST_PROMPT = 4000
"""Maximum tokens of a prompt whose length is drawn, as in DeepSpeed-FastGen's benchmark."""
_PLAIN = re.compile(r"[!-~Ġ]+")
"""A token whose text is ASCII."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Normally distributed lengths of prompts and answers, in tokens."""

    prompt: int
    answer: int
    deviation: float
    """Standard deviation, as a share of the mean."""

    def draw(self, random_numbers: random.Random) -> tuple[int, int]:
        """Returns the tokens of a prompt and of its answer."""
        prompt = random_numbers.gauss(self.prompt, self.deviation * self.prompt)
        answer = random_numbers.gauss(self.answer, self.deviation * self.answer)
        return max(16, min(MOST_PROMPT, int(prompt))), max(1, int(answer))


@dataclass(frozen=True, slots=True)
class Stage:
    """A load that both servers get."""

    title: str
    count: int
    """Number of requests."""
    lengths: Lengths | None = None
    """None: those of ShareGPT's conversations."""
    rate: float | None = None
    """Requests per second, a Poisson process; None: each client sends its next request when the last one has ended."""
    clients: int | None = None
    """Requests that run at once; None: all."""


STAGES: Mapping[str, Stage] = {
    "burst": Stage("ShareGPT, 500 requests at once", 500),
    "rate32": Stage("ShareGPT, 32 requests/s", 500, rate=32.0),
    "single": Stage("200 in / 256 out, 1 client", 8, Lengths(200, 256, 0.0), clients=1),
    "fastgen16": Stage("2600 in / 60 out, 16 clients", 96, Lengths(2600, 60, 0.3), clients=16),
    "fastgen64": Stage("2600 in / 60 out, 64 clients", 288, Lengths(2600, 60, 0.3), clients=64),
}
WARM_UP = Stage("warm-up", 64)


def write_dummy_model(name: str, folder: Path) -> None:
    """Writes the config.json of a shape of `bench.shapes`, and GPT-2's tokenizer with as many ids as that has.

    A model of random weights samples any id. Each has a text of ASCII, because half a letter would delay a chunk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = SHAPES[name]["vocab_size"]
    parts = json.loads(tokenizer().to_str())
    stored = parts["model"]["vocab"]
    vocabulary = {token if _PLAIN.fullmatch(token) else f"Ġx{number}x": number for token, number in stored.items()}
    vocabulary |= {f"Ġx{number}x": number for number in range(len(vocabulary), size)}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in parts["model"]["merges"]]
    parts["model"]["merges"] = [[a, b] for a, b in pairs if {a, b, a + b} <= vocabulary.keys()]
    parts["model"]["vocab"] = vocabulary
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)), bos_token=END, eos_token=END, pad_token=END
    )
    fast.save_pretrained(folder)
    config = SHAPES[name] | {
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": fast.bos_token_id,
        "eos_token_id": fast.eos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_requests(stage: Stage, file: Path, scale: float = 1.0) -> int:
    """Writes the requests of a stage for `pagewire bench serve`, the same ones each time; returns their number.

    `scale` below 1 makes fewer.
    """
    lines = [json.dumps(line) for line in _requests(stage, max(int(stage.count * scale), 4, stage.clients or 0))]
    file.write_text("\n".join(lines) + "\n")
    return len(lines)


def _requests(stage: Stage, count: int) -> Iterator[dict[str, object]]:
    """Yields requests with prompts of `text_drawer`."""
    draw = random.Random(stage.title)
    text, moment = text_drawer(draw), 0.0
    for _ in range(count):
        prompt, answer = draw.choice(sharegpt_lengths()) if stage.lengths is None else stage.lengths.draw(draw)
        yield {"prompt": text(prompt), "output_tokens": answer, "at": moment}
        moment += draw.expovariate(stage.rate) if stage.rate else 0.0
