"""Beam search as transformers does it, and searches over a model that is a function."""

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pagewire.services.scheduler.policy.beam_search.ranking import BeamSearch, Candidates, Hypothesis
from tests.support.checkpoints import VOCABULARY, checkpoint, reference_logits, reference_model

EOS_ID = 0
"""End-of-sequence id of every checkpoint."""


class BeamCase(NamedTuple):
    """A prompt, how it is searched, and what transformers finds."""

    prompt: list[int]
    width: int
    n: int
    length_penalty: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    tokens: list[list[int]]
    """The n best, each up to the token that ended it."""


def transformers_beams(
    folder: Path,
    prompt: Sequence[int],
    *,
    width: int,
    n: int = 1,
    length_penalty: float = 1.0,
    max_tokens: int = 12,
    stop_ids: Sequence[int] = (EOS_ID,),
    min_tokens: int = 0,
) -> list[list[int]]:
    """The `n` best of a beam search in float32."""
    with torch.inference_mode():
        generated = reference_model(folder).generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            do_sample=False,
            early_stopping=False,
            length_penalty=length_penalty,
            max_new_tokens=max_tokens,
            num_return_sequences=n,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=VOCABULARY - 1,
            min_new_tokens=min_tokens or None,
            use_cache=True,
        )
    return [_cut(row[len(prompt) :].tolist(), stop_ids) for row in generated]


def _cut(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """Without what pads a shorter text."""
    ends = [i for i, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def run_search(
    search: BeamSearch, prompt: Sequence[int], count: int, logprobs: Callable[[list[int]], Any]
) -> list[Hypothesis]:
    """Runs a search to its end; `logprobs` of a text are [V] of the token behind it."""
    while search.beams:
        hypotheses = []
        for beam in search.beams:
            row = np.asarray(logprobs([*prompt, *beam.tokens]), np.float32)
            best = np.argsort(-row, kind="stable")[:count]
            hypotheses.append(Candidates(best.tolist(), row[best]))
        search.advance(hypotheses)
    return search.finished


def reference_logprobs(folder: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    """[V] behind `tokens`, computed from the beginning."""
    logprobs: np.ndarray[Any, Any] = torch.log_softmax(reference_logits(folder, tokens)[-1], dim=-1).numpy()
    return logprobs


@functools.cache
def beam_cases(name: str, count: int = 12) -> tuple[BeamCase, ...]:
    """Cases of mixed numbers of beams, lengths and penalties for a checkpoint; some have many ends of text."""
    draw = random.Random(f"{name} beams")
    cases = []
    for i in range(count):
        prompt = [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, 40))]
        width = draw.choice([2, 3, 4, 5])
        n = draw.randint(1, width)
        penalty = draw.choice([1.0, 1.0, 0.0, 2.0, -0.5])
        max_tokens = draw.randint(1, 14)
        stop_ids = (EOS_ID, *(range(1, 40) if i % 3 == 0 else ()))
        tokens = transformers_beams(
            checkpoint(name),
            prompt,
            width=width,
            n=n,
            length_penalty=penalty,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
        )
        cases.append(BeamCase(prompt, width, n, penalty, max_tokens, stop_ids, tokens))
    return tuple(cases)
