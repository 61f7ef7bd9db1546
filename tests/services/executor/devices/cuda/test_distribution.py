"""The GPU's sampler draws the tokens that the CPU's draws, whose distribution is the exact one."""

import numpy as np
import pytest
import torch

from pagewire.kernels.triton.sampling.edit_logits import edit_logits
from pagewire.kernels.triton.sampling.sampler import TILE, sample
from pagewire.services.executor.devices.cuda.slot_tables import GpuSlots
from tests.services.executor.devices.cuda.twins import runtime
from tests.services.executor.test_distribution import (
    CAPACITY,
    CASES,
    OUTPUT,
    PROMPT,
    draw,
    edits_of,
    logits,
    positions,
    record_of,
)
from tests.support.distribution import Case

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
SOME = 12
"""Draws of each case, which take Triton's interpreter a while."""


def draw_cuda(case: Case, draws: int) -> list[int]:
    device = runtime().device
    tables = GpuSlots(CAPACITY, device)
    for places, values in tables.added(0, [0], record_of(case), case.stops, edits_of(case)):
        tables.memory[torch.from_numpy(places).to(device)] = torch.from_numpy(np.ascontiguousarray(values)).to(device)
    so_far = torch.tensor([PROMPT + OUTPUT], dtype=torch.int32, device=device)
    one, slot = logits().to(device), torch.zeros(draws, dtype=torch.int32, device=device)
    ends = torch.from_numpy(positions(draws)).to(device, torch.int32)
    mask = torch.zeros(1, tables.sampling.allowed.shape[1], dtype=torch.int32, device=device)
    edit_logits(tables.sampling, one, slot[:1], ends[:1], torch.zeros_like(ends[:1]), mask, so_far)
    tokens, tiles = torch.empty_like(slot), torch.empty(draws, 2, -(-one.shape[1] // TILE), device=device)
    sample(tables.sampling, one.repeat(draws, 1), slot, ends, tiles, tokens)
    ids: list[int] = tokens.tolist()
    return ids


@pytest.mark.parametrize("draws", [SOME, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_draws_equal_the_cpus(name: str, draws: int) -> None:
    assert draw_cuda(CASES[name], draws) == draw(CASES[name])[:draws]
