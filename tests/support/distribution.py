"""Logits edited by scalar parameters, biases and allowed tokens, written down in the order of operations."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagewire.shared.sampling_parameters import record

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """Columns of a record, and edits of logits."""

    columns: Mapping[str, float] = field(default_factory=dict)
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()
    stops: tuple[int, ...] = ()
    """Barred, because the text is too short to end."""


def edited(logits: Float64, prompt: Sequence[int], output: Sequence[int], case: Case) -> Float64:
    """Logits [V] of the token behind prompt and output."""
    x, of = logits.astype(np.float64), record(**case.columns)
    if case.allowed:
        x[[token for token in range(len(x)) if token not in case.allowed]] = -np.inf
    for token, bias in case.bias.items():
        x[token] += bias
    x[list(case.stops)] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / of["repetition_penalty"] if x[token] > 0 else x[token] * of["repetition_penalty"]
    for token, count in Counter(output).items():
        x[token] -= count * of["frequency_penalty"] + of["presence_penalty"]
    for *others, last in case.bad:
        if list(output[len(output) - len(others) :]) == others:
            x[last] = -np.inf
    return x


def exact(logits: Float64, prompt: Sequence[int], output: Sequence[int], case: Case) -> Float64:
    """Probabilities [V] of the token behind prompt and output; at temperature 1 unless the case has another."""
    x, of = edited(logits, prompt, output, case), record(**{"temperature": 1.0} | dict(case.columns))
    weights = np.exp((x - x.max()) / of["temperature"])
    weights[weights < of["min_p"]] = 0.0
    if of["top_k"]:
        weights[weights < np.sort(weights)[-int(of["top_k"])]] = 0.0
    falling = np.sort(weights)[::-1]
    last = int(np.searchsorted(np.cumsum(falling), of["top_p"] * falling.sum())) if of["top_p"] < 1 else len(x) - 1
    weights[weights < falling[last]] = 0.0
    probabilities: Float64 = weights / weights.sum()
    return probabilities
