"""Over 20,000 draws on a tiny vocabulary, every parameter that changes the distribution gives the exact one."""

import math
from collections import Counter
from collections.abc import Callable
from ctypes import addressof
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels, LogitEdits, SamplingTable, address
from pagewire.services.executor.devices.compiled import _pointers
from pagewire.services.executor.devices.edits import edit, slot_edits
from pagewire.services.executor.devices.protocol import Capacity, Edits
from pagewire.services.executor.sampling import sample
from pagewire.shared.sampling import is_penalized, record

DRAWS = 20_000
VOCABULARY = 20
PROMPT, OUTPUT = [3, 3, 5, 7], [7, 9, 9, 9, 11]
LOGITS = np.random.default_rng(4).normal(0, 1.5, VOCABULARY)


@dataclass(frozen=True)
class Case:
    """Columns of a record, biases and allowed tokens."""

    columns: dict[str, float] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()


CASES = {
    "nothing": Case(),
    "temperature": Case({"temperature": 0.6}),
    "top_k": Case({"top_k": 5}),
    "top_p": Case({"top_p": 0.7}),
    "min_p": Case({"min_p": 0.2}),
    "repetition": Case({"repetition_penalty": 1.8}),
    "frequency": Case({"frequency_penalty": 0.7}),
    "presence": Case({"presence_penalty": -1.5}),
    "bias": Case(bias={2: 2.0, 9: -100.0, 0: 0.5}),
    "allowed": Case(allowed=(1, 3, 9, 11, 19)),
    "all": Case(
        {
            "temperature": 1.4,
            "top_k": 9,
            "top_p": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.4,
        },
        bias={9: 3.0, 12: -1.0},
        allowed=(*range(1, 15),),
    ),
}


def exact(case: Case) -> npt.NDArray[np.float64]:
    """The distribution, written down in the order of operations."""
    x, of = LOGITS.copy(), record(**{"temperature": 1.0} | case.columns)
    if case.allowed:
        x[[token for token in range(VOCABULARY) if token not in case.allowed]] = -np.inf
    for token, bias in case.bias.items():
        x[token] += bias
    for token in {*PROMPT, *OUTPUT}:
        x[token] = x[token] / of["repetition_penalty"] if x[token] > 0 else x[token] * of["repetition_penalty"]
    for token, count in Counter(OUTPUT).items():
        x[token] -= count * of["frequency_penalty"] + of["presence_penalty"]
    weights = np.exp((x - x.max()) / of["temperature"])
    weights[weights < of["min_p"]] = 0.0
    if of["top_k"]:
        weights[weights < np.sort(weights)[-int(of["top_k"])]] = 0.0
    falling = np.sort(weights)[::-1]
    last = int(np.searchsorted(np.cumsum(falling), of["top_p"] * falling.sum())) if of["top_p"] < 1 else VOCABULARY - 1
    weights[weights < falling[last]] = 0.0
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def edits_of(case: Case) -> Edits:
    return Edits(
        bias_ids=np.array([*case.bias], np.int64),
        biases=np.array([*case.bias.values()], np.float32),
        allowed_ids=np.array(case.allowed, np.int64),
        bad_words=np.empty(0, np.int64),
        penalized=is_penalized(record(**case.columns)),
        num_prompt_tokens=len(PROMPT),
        tokens=np.array(PROMPT + OUTPUT),
    )


def draw_pytorch(case: Case) -> list[int]:
    x = torch.tensor(LOGITS, dtype=torch.float32).repeat(DRAWS, 1)
    state = slot_edits(edits_of(case), Capacity(1, 1, 1, 40, VOCABULARY))
    row = record(**{"temperature": 1.0, "key": 5} | case.columns)
    records, positions = np.tile(row, DRAWS), np.arange(DRAWS) + len(PROMPT + OUTPUT)
    one = x[:1].clone()
    edit(one, records[:1], positions[:1], [state])
    tokens: list[int] = sample(one.repeat(DRAWS, 1), records, positions).tolist()
    return tokens


def draw_compiled(case: Case) -> list[int]:
    kernels = CpuKernels(build.load(), 1)
    x = torch.tensor(LOGITS, dtype=torch.float32).repeat(DRAWS, 1)
    state = slot_edits(edits_of(case), Capacity(1, 1, 1, 40, VOCABULARY))
    records = np.array([record(**{"temperature": 1.0, "key": 5} | case.columns)])
    edits, stops = (LogitEdits * 1)(_pointers(state)), np.array([[-1]])
    table = SamplingTable(address(records), address(stops), 1, addressof(edits))
    slots, positions = np.zeros(DRAWS, np.int64), np.arange(DRAWS) + len(PROMPT + OUTPUT)
    kernels.edit_logits(x, table, slots, positions)
    tokens: list[int] = kernels.sample(x, table, slots, positions).tolist()
    return tokens


@pytest.mark.parametrize("draw", [draw_pytorch, draw_compiled])
@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(name: str, draw: Callable[[Case], list[int]]) -> None:
    expected = exact(CASES[name]) * DRAWS
    observed = np.bincount(draw(CASES[name]), minlength=VOCABULARY)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    chi_square = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees: Any = kept.sum() - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees), "further off than four standard deviations"
