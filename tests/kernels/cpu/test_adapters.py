"""Updates of adapters: of every rank, in every mix, and with the bits that a row has alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.adapters import CompiledAdapter, StepAdapters, UpdateKernel
from pagewire.kernels.cpu.kernels import CpuKernels, Int64
from pagewire.kernels.low_rank import LowRank

RANKS = (3, 4, 8, 12, 16, 24, 48, 64)
ROWS = 40
"""Rows of a step: half of them have one adapter, more than a kernel takes at a time."""
NUMBER = 1
"""Number of the matrix in the model."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Absolute, of sums near 1: in bf16 both inputs and the sums between the factors are rounded."""


def updates(inputs: int, outputs: Sequence[int], rank: int, random: torch.Generator) -> list[LowRank]:
    first, parts = 0, []
    for count in outputs:
        shrink = torch.randn(rank, inputs, generator=random) * inputs**-0.5
        expand = torch.randn(count, rank, generator=random) * rank**-0.5
        parts.append(LowRank(shrink, expand, first, 0.7))
        first += count
    return parts


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, (64, 32, 32)), (80, (48, 40)), (36, (33,)), (576, (192,))])
def test_rows_are_updated_by_their_adapter_alone(
    inputs: int, outputs: tuple[int, ...], threads: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(0)
    kernels = CpuKernels(build.load(), threads)
    kernel = UpdateKernel(kernels)
    x, before = torch.randn(ROWS, inputs, generator=random), torch.randn(ROWS, sum(outputs), generator=random)
    owners = torch.randint(-1, len(RANKS), (ROWS,), generator=random).numpy()
    owners[::2] = 4
    expected, step = before.double(), []
    for owner, rank in enumerate(RANKS):
        parts, rows = updates(inputs, outputs, rank, random), np.flatnonzero(owners == owner)
        step.append((CompiledAdapter(kernels, {NUMBER: parts}, NUMBER + 1, dtype), rows))
        for one in parts:
            shrink, expand = one.shrink.to(dtype).double(), one.expand.to(dtype).double()
            columns = slice(one.first, one.first + len(expand))
            expected[rows, columns] += one.scale * (x[rows].double() @ shrink.T) @ expand.T
    step = [(adapter, rows) for adapter, rows in step if len(rows)]

    def updated(adapters: list[tuple[CompiledAdapter, Int64]]) -> Tensor:
        out = before.clone()
        kernel(StepAdapters(adapters).rows, NUMBER, x, out)
        return out

    together = updated(step)
    torch.testing.assert_close(together.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(together[owners < 0], before[owners < 0])
    for adapter, rows in step:
        for row in rows[:3]:
            assert torch.equal(updated([(adapter, np.array([row]))])[row], together[row])
