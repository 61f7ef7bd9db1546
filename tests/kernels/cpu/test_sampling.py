"""The compiled sampler picks what sorting everything in float64 picks."""

import math
from ctypes import addressof
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.cpu.kernels import CpuKernels, LogitEdits, SamplerInput, address
from pagewire.services.executor.devices.pytorch_sampling import uniforms
from pagewire.shared.sampling_parameters import NOT_FINITE
from tests.services.executor.devices.test_pytorch_sampling import (
    BROKEN,
    LAST_POSITION,
    How,
    filtered,
    hows,
    possible,
    records,
)


def draw(
    kernels: CpuKernels, logits: npt.ArrayLike, hows: list[How], banned: tuple[int, ...] = (), min_length: int = 0
) -> list[int]:
    """One token per row of `logits`; row r belongs to slot R - 1 - r, so that none is in its place."""
    count = len(hows)
    table = records(hows[::-1])
    table["min_length"] = min_length
    stop_ids = np.tile(np.array([*banned, -1]), (count, 1))
    edits = (LogitEdits * count)()
    sampling = SamplerInput(address(table), address(stop_ids), len(banned) + 1, addressof(edits))
    positions = np.array([how.position for how in hows])
    x = torch.tensor(np.array(logits), dtype=torch.float32)
    slots = np.arange(count)[::-1].copy()
    if banned:
        kernels.edit_logits(x, sampling, slots, positions)
    ids: list[int] = kernels.sample(x, sampling, slots, positions).tolist()
    return ids


@settings(max_examples=80, deadline=None)
@given(
    hows=st.lists(hows, min_size=1, max_size=6),
    vocabulary=st.sampled_from([1, 2, 17, 300, 1024, 3000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 9.0, 60.0]),
    coarse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_picks_what_a_full_sort_picks(
    kernels: CpuKernels, hows: list[How], vocabulary: int, spread: float, coarse: bool, seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, (len(hows), vocabulary)).astype(np.float32)
    if coarse:
        logits = logits.round()  # so that many logits are equal, also at the thresholds
    for row, (token, how) in enumerate(zip(draw(kernels, logits, hows), hows, strict=True)):
        assert token in possible(logits[row].astype(np.float64), how)


@settings(max_examples=20, deadline=None)
@given(hows=st.lists(hows, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_neither_neighbours_nor_threads_count(
    kernels: CpuKernels, many_threads: CpuKernels, hows: list[How], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(hows), 2000)).astype(np.float32)
    together = draw(kernels, logits, hows)
    assert together == draw(many_threads, logits, hows)
    assert together == [draw(kernels, logits[row : row + 1], [how])[0] for row, how in enumerate(hows)]


@pytest.mark.parametrize(
    "how", [How(), How(temperature=0.5), How(top_k=5), How(top_p=0.7), How(min_p=0.2), How(1.5, 0.9, 9, 0.05)]
)
def test_frequencies_are_those_of_the_filtered_softmax(kernels: CpuKernels, how: How) -> None:
    count = 20_000
    logits = np.random.default_rng(4).normal(0, 1.5, 20)
    expected = filtered(logits, how) * count
    ids = draw(kernels, np.tile(logits, (count, 1)), [how._replace(position=place) for place in range(count)])
    observed = np.bincount(ids, minlength=20)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    chi_square = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees = kept.sum() - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees), "further off than four standard deviations"


class Numbers(NamedTuple):
    """What a random number depends on."""

    key: int
    position: int


@settings(max_examples=100, deadline=None)
@given(st.builds(Numbers, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)))
def test_numbers_are_those_of_every_other_device(kernels: CpuKernels, numbers: Numbers) -> None:
    """With equal weights the token is the number itself, cut to the vocabulary."""
    vocabulary = 4096
    (number,) = uniforms(np.array([numbers.key], np.uint64), np.array([numbers.position]))
    (token,) = draw(kernels, np.zeros((1, vocabulary)), [How(key=numbers.key, position=numbers.position)])
    assert token == int(number * vocabulary)


def test_greedy_takes_the_largest_and_the_lowest_of_equals(kernels: CpuKernels) -> None:
    logits = [[0.0, 3.0, 3.0, 1.0], [7.0, 7.0, 7.0, 7.0], [-5.0, -4.0, -3.0, -2.0]]
    assert draw(kernels, logits, [How(temperature=0.0)] * 3) == [1, 0, 3]
    wide = np.random.default_rng(0).normal(0, 1, (30, 5001)).round(1)
    assert draw(kernels, wide, [How(temperature=0.0)] * 30) == wide.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_not_picked_below_the_minimum_length(kernels: CpuKernels, temperature: float) -> None:
    logits = np.tile([9.0, 1.0, 5.0, 8.0], (100, 1))
    hows = [How(temperature, position=place) for place in range(100)]
    ids = draw(kernels, logits, hows, banned=(0, 3), min_length=90)
    assert set(ids[:90]) <= {1, 2}
    assert set(ids[90:]) <= {0, 3}


def test_the_largest_number_still_picks_a_token_that_is_possible(kernels: CpuKernels) -> None:
    logits = np.array([2.0, 1.0, 3.0, -1000.0, -1000.0])
    assert draw(kernels, [logits], [How(key=0, position=LAST_POSITION)]) == [2]


def test_rows_that_are_not_finite_are_marked(kernels: CpuKernels) -> None:
    for how in (How(temperature=0.0), How(), How(top_p=0.5), How(top_k=2, min_p=0.1, top_p=0.9)):
        assert draw(kernels, BROKEN, [how] * len(BROKEN)) == [*[NOT_FINITE] * (len(BROKEN) - 1), 2]
    wide = np.zeros((1, 5001))
    wide[0, 4999] = math.nan
    assert draw(kernels, wide, [How()]) == [NOT_FINITE]


def test_extreme_temperatures(kernels: CpuKernels) -> None:
    logits = [[1.0, 2.0, 3.0]] * 2
    assert draw(kernels, logits, [How(temperature=1e-30), How(temperature=1e-6)]) == [2, 2]
    assert draw(kernels, [[3e38, -3e38, 0.0]], [How(temperature=1e30, position=3)])[0] in {0, 1, 2}
