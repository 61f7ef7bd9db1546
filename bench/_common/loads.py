"""The requests of a load: lengths, prompts and arrivals, all drawn from a seed."""

import csv
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

_SHAREGPT = Path(__file__).resolve().parents[1] / "data" / "sharegpt_lengths.csv"
_SONNET_PROMPT = 462
_SONNET_SHARED = 62
"""Tokens that all sonnet prompts begin with: the instruction, and the first lines."""
_VOCABULARY = 32_000


@dataclass(slots=True, eq=False)
class Request:
    """A request and its results. Times are seconds from the start of the run."""

    at: float
    """Time at which its client sends it."""
    prompt: list[int]
    output: int
    """Tokens to generate."""
    client: int = 0
    """Number of its client, in a closed loop."""
    tokens: list[int] = field(default_factory=list)
    """Generated tokens."""
    tokens_at: list[float] = field(default_factory=list)
    """Times at which they reached the client."""
    cached: int = 0
    """Tokens of the prompt that were found in the prefix cache."""

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.tokens_at[0] - self.at

    @property
    def latency(self) -> float:
        """Time to the last token."""
        return self.tokens_at[-1] - self.at

    @property
    def intervals(self) -> list[float]:
        """Times between tokens."""
        return [b - a for a, b in pairwise(self.tokens_at)]


Lengths = Callable[[random.Random, int], list[Request]]


def prompt_of(draw: random.Random, tokens: int) -> list[int]:
    """Draws the ids of a prompt of so many tokens."""
    return draw.choices(range(_VOCABULARY), k=tokens)


@cache
def sharegpt_lengths() -> list[tuple[int, int]]:
    """Returns the Llama-2 tokens of prompt and answer of the ShareGPT conversations that vLLM's filter keeps."""
    with _SHAREGPT.open(newline="") as file:
        return [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]


def sharegpt(draw: random.Random, count: int) -> list[Request]:
    """Draws requests with ShareGPT's lengths, whose prompts share no beginning."""
    chosen = draw.choices(sharegpt_lengths(), k=count)
    return [Request(0.0, prompt_of(draw, prompt), output) for prompt, output in chosen]


def _sonnet(output: int) -> Lengths:
    def draw_requests(draw: random.Random, count: int) -> list[Request]:
        shared = prompt_of(draw, _SONNET_SHARED)
        own = _SONNET_PROMPT - _SONNET_SHARED
        return [Request(0.0, shared + prompt_of(draw, own), output) for _ in range(count)]

    return draw_requests


LOADS: Mapping[str, Lengths] = {
    "ShareGPT": sharegpt,
    "prefill-heavy": _sonnet(16),
    "decode-heavy": _sonnet(256),
}
"""The loads of vLLM 0.6.0's benchmarks: ShareGPT, and 462 tokens of sonnets in with 16 or 256 out."""


def poisson(load: Lengths, qps: float, count: int, seed: int) -> list[Request]:
    """Draws `count` requests that arrive as a Poisson process of `qps` per second; all at once if it is infinite."""
    draw = random.Random(seed)
    requests = load(draw, count)
    now = 0.0
    for request in requests:
        request.at = now
        now += draw.expovariate(qps) if qps != float("inf") else 0.0
    return requests


def fastgen(prompt: int, output: int, seed: int) -> Iterator[Request]:
    """Draws requests without end as DeepSpeed-FastGen does: normal lengths with 30 % deviation, prompts up to 4000."""
    draw = random.Random(seed)
    while True:
        tokens = max(16, min(4000, int(draw.gauss(prompt, 0.3 * prompt))))
        yield Request(0.0, prompt_of(draw, tokens), max(1, int(draw.gauss(output, 0.3 * output))))
