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
from pagewire.shared.sampling_parameters import NOT_FINITE
from tests.support.exact_sampling import BROKEN, LAST_POSITION, Sampling, filtered, possible, records, samplings
from tests.support.philox import uniforms


def draw(
    kernels: CpuKernels,
    logits: npt.ArrayLike,
    samplings: list[Sampling],
    banned: tuple[int, ...] = (),
    min_length: int = 0,
) -> list[int]:
    """One token per row of `logits`; row r belongs to slot R - 1 - r, so that none is in its place."""
    count = len(samplings)
    table = records(samplings[::-1])
    table["min_length"] = min_length
    stop_ids = np.tile(np.array([*banned, -1]), (count, 1))
    edits = (LogitEdits * count)()
    inputs = SamplerInput(address(table), address(stop_ids), len(banned) + 1, addressof(edits))
    positions = np.array([sampling.position for sampling in samplings])
    x = torch.tensor(np.array(logits), dtype=torch.float32)
    slots = np.arange(count)[::-1].copy()
    if banned:
        kernels.edit_logits(x, inputs, slots, positions)
    ids: list[int] = kernels.sample(x, inputs, slots, positions).tolist()
    return ids


@settings(max_examples=80, deadline=None)
@given(
    samplings=st.lists(samplings, min_size=1, max_size=6),
    vocabulary=st.sampled_from([1, 2, 17, 300, 1024, 3000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 9.0, 60.0]),
    coarse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_drawn_token_is_kept_by_a_full_sort(
    kernels: CpuKernels, samplings: list[Sampling], vocabulary: int, spread: float, coarse: bool, seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, (len(samplings), vocabulary)).astype(np.float32)
    if coarse:
        logits = logits.round()  # so that many logits are equal, also at the thresholds
    for row, (token, sampling) in enumerate(zip(draw(kernels, logits, samplings), samplings, strict=True)):
        assert token in possible(logits[row].astype(np.float64), sampling)


@settings(max_examples=20, deadline=None)
@given(samplings=st.lists(samplings, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_neither_neighbours_nor_threads_count(
    kernels: CpuKernels, many_threads: CpuKernels, samplings: list[Sampling], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(samplings), 2000)).astype(np.float32)
    together = draw(kernels, logits, samplings)
    assert together == draw(many_threads, logits, samplings)
    assert together == [draw(kernels, logits[row : row + 1], [sampling])[0] for row, sampling in enumerate(samplings)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=5),
        Sampling(top_p=0.7),
        Sampling(min_p=0.2),
        Sampling(1.5, 0.9, 9, 0.05),
    ],
)
def test_frequencies_follow_the_filtered_softmax(kernels: CpuKernels, sampling: Sampling) -> None:
    count = 20_000
    logits = np.random.default_rng(4).normal(0, 1.5, 20)
    expected = filtered(logits, sampling) * count
    ids = draw(kernels, np.tile(logits, (count, 1)), [sampling._replace(position=place) for place in range(count)])
    observed = np.bincount(ids, minlength=20)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    chi_square = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees = kept.sum() - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees), "further off than four standard deviations"


class Numbers(NamedTuple):
    """The key and the position that decide a random number."""

    key: int
    position: int


@settings(max_examples=100, deadline=None)
@given(st.builds(Numbers, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)))
def test_random_numbers_equal_other_devices_numbers(kernels: CpuKernels, numbers: Numbers) -> None:
    """With equal weights the token is the number itself, cut to the vocabulary."""
    vocabulary = 4096
    (number,) = uniforms(np.array([numbers.key], np.uint64), np.array([numbers.position]))
    (token,) = draw(kernels, np.zeros((1, vocabulary)), [Sampling(key=numbers.key, position=numbers.position)])
    assert token == int(number * vocabulary)


def test_greedy_takes_the_largest_and_the_lowest_of_equals(kernels: CpuKernels) -> None:
    logits = [[0.0, 3.0, 3.0, 1.0], [7.0, 7.0, 7.0, 7.0], [-5.0, -4.0, -3.0, -2.0]]
    assert draw(kernels, logits, [Sampling(temperature=0.0)] * 3) == [1, 0, 3]
    wide = np.random.default_rng(0).normal(0, 1, (30, 5001)).round(1)
    assert draw(kernels, wide, [Sampling(temperature=0.0)] * 30) == wide.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_not_picked_below_the_minimum_length(kernels: CpuKernels, temperature: float) -> None:
    logits = np.tile([9.0, 1.0, 5.0, 8.0], (100, 1))
    samplings = [Sampling(temperature, position=place) for place in range(100)]
    ids = draw(kernels, logits, samplings, banned=(0, 3), min_length=90)
    assert set(ids[:90]) <= {1, 2}
    assert set(ids[90:]) <= {0, 3}


def test_the_largest_number_still_picks_a_token_that_is_possible(kernels: CpuKernels) -> None:
    logits = np.array([2.0, 1.0, 3.0, -1000.0, -1000.0])
    assert draw(kernels, [logits], [Sampling(key=0, position=LAST_POSITION)]) == [2]


def test_rows_that_are_not_finite_are_marked(kernels: CpuKernels) -> None:
    for sampling in (
        Sampling(temperature=0.0),
        Sampling(),
        Sampling(top_p=0.5),
        Sampling(top_k=2, min_p=0.1, top_p=0.9),
    ):
        assert draw(kernels, BROKEN, [sampling] * len(BROKEN)) == [*[NOT_FINITE] * (len(BROKEN) - 1), 2]
    wide = np.zeros((1, 5001))
    wide[0, 4999] = math.nan
    assert draw(kernels, wide, [Sampling()]) == [NOT_FINITE]


def test_extreme_temperatures_pick_possible_tokens(kernels: CpuKernels) -> None:
    logits = [[1.0, 2.0, 3.0]] * 2
    assert draw(kernels, logits, [Sampling(temperature=1e-30), Sampling(temperature=1e-6)]) == [2, 2]
    assert draw(kernels, [[3e38, -3e38, 0.0]], [Sampling(temperature=1e30, position=3)])[0] in {0, 1, 2}
