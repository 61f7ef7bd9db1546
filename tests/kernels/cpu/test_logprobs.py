"""The kernel's reports on tokens equal those by a full sort in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices import logprobs
from pagewire.shared.messages.step import LOWEST_LOGPROB

ROWS = 5


@settings(max_examples=80, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, 15, 17, 255, 256, 300, 3000]),
    entries=st.sampled_from([1, 2, 6, 40, 4000]),
    spread=st.sampled_from([0.0, 0.3, 9.0, 60.0]),
    coarse=st.booleans(),
    banned=st.sampled_from([0.0, 0.5, 1.0]),
    normalized=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_ranks_and_the_likeliest_are_right(
    kernels: CpuKernels,
    vocabulary: int,
    entries: int,
    spread: float,
    coarse: bool,
    banned: float,
    normalized: bool,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(0, spread, (ROWS, vocabulary)).astype(np.float32)
    if coarse:
        logits = logits.round()  # so that many logits are equal
    kept = random.integers(vocabulary, size=ROWS)
    mask = random.random(logits.shape) < banned
    mask[np.arange(ROWS), kept] = False
    logits[mask] = -np.inf
    tokens = random.integers(vocabulary, size=ROWS)
    report = kernels.reduce_logprobs(
        torch.from_numpy(logits), torch.from_numpy(tokens), entries, normalized=normalized
    ).numpy()
    count = min(entries, vocabulary + 1)
    assert report.shape == (ROWS, 2 * count + 1)
    exact = logits.astype(np.float64)
    if normalized:
        exact -= np.logaddexp.reduce(exact, axis=1)[:, None]
    for row in range(ROWS):
        order = sorted(range(vocabulary), key=lambda token: -logits[row, token])
        ids = [int(tokens[row]), *order[: count - 1]]
        assert report[row, :count].tolist() == ids
        values = np.maximum(exact[row, ids], LOWEST_LOGPROB)
        assert report[row, count : 2 * count].view(np.float32) == pytest.approx(values, abs=2e-5, rel=2e-6)
        assert report[row, -1] == (logits[row] >= logits[row, ids[0]]).sum()


def test_reports_equal_pytorchs(kernels: CpuKernels) -> None:
    logits = torch.randn(40, 5000, generator=torch.manual_seed(3))
    tokens = torch.randint(-2, 5000, (40,), generator=torch.manual_seed(4))
    result, expected = (f(logits, tokens, 6) for f in (kernels.reduce_logprobs, logprobs.reduce_logprobs))
    real = tokens >= 0
    assert torch.equal(result[:, :6], expected[:, :6])
    assert torch.equal(result[real, -1], expected[real, -1])
    assert torch.allclose(result[:, 6:12].view(torch.float32), expected[:, 6:12].view(torch.float32), atol=1e-5)


def test_neither_neighbours_nor_threads_count(kernels: CpuKernels, many_threads: CpuKernels) -> None:
    logits = torch.randn(40, 3000, generator=torch.manual_seed(5))
    tokens = torch.arange(40)
    together = many_threads.reduce_logprobs(logits, tokens, 21)
    for row in range(40):
        assert torch.equal(kernels.reduce_logprobs(logits[row : row + 1], tokens[row : row + 1], 21)[0], together[row])


def test_a_value_that_is_not_finite_is_the_lowest(kernels: CpuKernels) -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    report = kernels.reduce_logprobs(logits, torch.tensor([1]), 2)[0]
    assert report[:2].tolist() == [1, 0]
    assert report[2:4].view(torch.float32).tolist() == pytest.approx([LOWEST_LOGPROB, -math.log(2)])
    assert report[4] == 3
