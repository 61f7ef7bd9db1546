"""The requests of a run, all from a seed."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NATS, HTTP = "nats", "http"
SHAPES = ("greedy", "sampled", "several", "stop", "beams", "cancelled", "slow", "whole", "logprobs", "grammar")
"""Kinds of requests, over each transport."""
PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "An old woman lived in a small house near the sea, and every morning",
    "Three reasons to learn a language: first,",
    "How far is the moon?",
    "def fibonacci(n):",
    "The train was late again, so",
    "In the year 1887 a ship left the harbour of",
)
STOPS = (".", ",", " and", " the")


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is sent many times. Its seed is fixed, so that its answer is always the same."""

    number: int
    transport: str
    shape: str
    prompt: str
    sampling: dict[str, Any]
    """Sampling fields other than their defaults, with the names of NATS."""
    cancel_after: int = 0
    """Tokens after which the client cancels it; 0: never."""
    model: str = ""
    """Name of the model that it is for; empty: the only one."""

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream."""
        return self.shape != "whole"

    @property
    def timed(self) -> bool:
        """Whether a pause that its reader sees is a pause of the stack: frames come steadily, and are read at once."""
        return self.streamed and self.shape not in {"slow", "beams"}

    def __str__(self) -> str:
        return f"request {self.number} ({self.shape} over {self.transport}{f' to {self.model}' if self.model else ''})"


def mixture(seed: int, tokens: int, rounds: int = 2, models: Sequence[str] = ("",)) -> list[Request]:
    """Returns `rounds` requests of each shape over each transport to each of the models.

    Their answers have up to `tokens` tokens.
    """
    rng = random.Random(f"requests {seed}")
    drawn = itertools.product(range(rounds), models, (NATS, HTTP), SHAPES)
    return [
        _draw(rng, number, model, transport, shape, tokens) for number, (_, model, transport, shape) in enumerate(drawn)
    ]


def _draw(rng: random.Random, number: int, model: str, transport: str, shape: str, tokens: int) -> Request:
    limit = rng.randint(tokens // 2, tokens)
    sampling: dict[str, Any] = {"max_tokens": limit, "ignore_eos": True, "temperature": 0.0}
    sampled = {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(1 << 31)}
    if shape == "sampled":
        sampling |= sampled
    elif shape == "several":
        sampling |= sampled | {"n": rng.randint(2, 4)}
    elif shape == "logprobs":
        sampling |= sampled | {"logprobs": 2}
    elif shape == "grammar":
        sampling |= sampled | {"structured_outputs": {"regex": f"([a-z]{{2,9}}[ ,.]){{{limit}}}"}}
    elif shape == "stop":
        sampling |= sampled | {"stop": rng.sample(STOPS, 2), "min_tokens": limit // 2}
    elif shape == "beams":
        sampling |= {"beam_width": 3, "n": 3, "max_tokens": max(2, limit // 2)}
        del sampling["temperature"]
    elif shape in {"cancelled", "slow", "whole"} and rng.random() < 0.5:
        sampling |= sampled
    cancel_after = rng.randint(1, limit // 2) if shape == "cancelled" else 0
    return Request(number, transport, shape, rng.choice(PROMPTS), sampling, cancel_after, model)
