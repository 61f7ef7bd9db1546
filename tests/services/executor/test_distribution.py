"""Over 20,000 draws on a tiny vocabulary, every parameter that changes the distribution gives the exact one."""

import math
from ctypes import addressof
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels, LogitEdits, SamplerInput, address
from pagewire.services.executor.devices.cpu.compiled_backend import _pointers
from pagewire.services.executor.devices.edits import slot_edits
from pagewire.services.executor.devices.protocol import Capacity, Edits, Int64
from pagewire.shared.sampling_parameters import Record, is_penalized, record
from tests.support.distribution import Case, exact

DRAWS = 20_000
VOCABULARY = 20
CAPACITY = Capacity(1, 1, 1, 40, VOCABULARY)
PROMPT, OUTPUT = [3, 3, 5, 7], [7, 9, 9, 9, 11]
LOGITS = np.random.default_rng(4).normal(0, 1.5, VOCABULARY)

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
    "min_tokens": Case(stops=(9, 12)),
    "bad_words": Case(bad=((9, 11, 4), (9, 3), (2,))),
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
        bad=((11, 5),),
        stops=(2, 7),
    ),
}


def edits_of(case: Case) -> Edits:
    return Edits(
        bias_ids=np.array([*case.bias], np.int64),
        biases=np.array([*case.bias.values()], np.float32),
        allowed_ids=np.array(case.allowed, np.int64),
        bad_words=np.array([number for word in case.bad for number in (len(word), *word)], np.int64),
        penalized=is_penalized(record(**case.columns)),
        num_prompt_tokens=len(PROMPT),
        tokens=np.array(PROMPT + OUTPUT),
    )


def record_of(case: Case) -> Record:
    """With a minimum length that is not reached at the position that is drawn, if there are stops."""
    return record(
        **{"temperature": 1.0, "key": 5} | dict(case.columns), min_length=len(PROMPT + OUTPUT) + bool(case.stops)
    )


def positions(draws: int) -> Int64:
    """Each with another random number."""
    return np.arange(draws) + len(PROMPT + OUTPUT)


def logits() -> torch.Tensor:
    return torch.tensor(LOGITS, dtype=torch.float32)[None].clone()


def draw(case: Case) -> list[int]:
    kernels, one, state = CpuKernels(build.load(), 1), logits(), slot_edits(edits_of(case), CAPACITY)
    records = np.array([record_of(case)])
    edits, stops = (LogitEdits * 1)(_pointers(state)), np.array([case.stops or (-1,)])
    table = SamplerInput(address(records), address(stops), stops.shape[1], addressof(edits))
    kernels.edit_logits(one, table, np.zeros(1, np.int64), positions(1))
    drawn = kernels.sample(one.repeat(DRAWS, 1), table, np.zeros(DRAWS, np.int64), positions(DRAWS))
    tokens: list[int] = drawn.tolist()
    return tokens


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    expected = exact(LOGITS, PROMPT, OUTPUT, CASES[name]) * DRAWS
    observed = np.bincount(draw(CASES[name]), minlength=VOCABULARY)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    chi_square = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees: Any = kept.sum() - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees), "further off than four standard deviations"
