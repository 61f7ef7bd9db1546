"""Sampling follows the filtered softmax, whatever the filters and the neighbours."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.devices.edits import edit
from pagewire.services.executor.devices.pytorch_sampling import CANDIDATES, sample, sequence_key, uniforms
from pagewire.shared.sampling_parameters import NOT_FINITE, RECORD, Record, record

torch.set_num_threads(1)

LAST_POSITION = 38471471
"""Where the sequence with key 0 has the largest number that there is, 1 - 2**-25."""


NAN, INF = math.nan, math.inf
BROKEN = [
    [NAN] * 4,
    [INF, NAN, 0.0, INF],
    [-INF] * 4,
    [1.0, NAN, 2.0, -INF],
    [1.0, INF, 2.0, 3.0],
    [0.0, -INF, 50.0, 0.0],
]
"""Logits of rows from which no token can be sampled, and of one from which only token 2 can."""


class How(NamedTuple):
    """The parameters of one row."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    key: int = 1
    position: int = 0


def records(hows: Sequence[How]) -> Record:
    found = np.tile(record(), len(hows))
    for name in set(How._fields) & set(RECORD.names or ()):
        found[name] = [getattr(how, name) for how in hows]
    return found


def draw(logits: npt.ArrayLike, hows: Sequence[How], banned: Sequence[tuple[int, tuple[int, ...]]] = ()) -> list[int]:
    x, positions = torch.tensor(np.array(logits), dtype=torch.float32), np.array([how.position for how in hows])
    if banned:
        edit(x, records(hows), positions, [None] * len(hows), banned)
    ids: list[int] = sample(x, records(hows), positions).tolist()
    return ids


def filtered(logits: npt.NDArray[np.float64], how: How, slack: float = 0.0) -> npt.NDArray[np.float64]:
    """The probabilities that are left, from sorting everything, in double precision.

    `slack` moves the thresholds by so much, relatively: tokens within it are decided by rounding.
    """
    weights: npt.NDArray[np.float64] = np.exp((logits - logits.max()) / how.temperature)
    weights[weights < min(how.min_p * (1 + slack), 1.0)] = 0.0
    if 0 < how.top_k < len(weights):
        weights[weights < np.sort(weights)[-how.top_k]] = 0.0
    if how.top_p < 1:
        falling = np.sort(weights)[::-1]
        reached = np.cumsum(falling)
        last = int(np.searchsorted(reached, how.top_p * (1 + slack) * reached[-1]))
        weights[weights < falling[min(last, len(falling) - 1)]] = 0.0
    total: np.float64 = weights.sum()
    return weights / total


def possible(logits: npt.NDArray[np.float64], how: How) -> set[int]:
    """The tokens that exact arithmetic picks, and those that it would pick but for rounding."""
    (number,) = uniforms(np.array([how.key], np.uint64), np.array([how.position]))
    found: set[int] = set()
    for slack in (-1e-5, 0.0, 1e-5):
        weights = filtered(logits, how, slack)
        ends = np.cumsum(weights)
        starts = ends - weights
        found.update(np.flatnonzero((weights > 0) & (starts <= number + 1e-5) & (ends >= number - 1e-5)).tolist())
    return found


hows = st.builds(
    How,
    temperature=st.floats(0.1, 3.0),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    top_k=st.one_of(st.just(0), st.integers(1, 5000)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    key=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
)


@settings(max_examples=80, deadline=None)
@given(
    hows=st.lists(hows, min_size=1, max_size=6),
    vocabulary=st.sampled_from([1, 2, 17, 300, CANDIDATES, 3000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 9.0]),
    coarse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_picks_what_a_full_sort_picks(hows: list[How], vocabulary: int, spread: float, coarse: bool, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, (len(hows), vocabulary)).astype(np.float32)
    if coarse:
        logits = logits.round()  # so that many logits are equal, also at the thresholds
    for row, (token, how) in enumerate(zip(draw(logits, hows), hows, strict=True)):
        assert token in possible(logits[row].astype(np.float64), how)


@settings(max_examples=20, deadline=None)
@given(hows=st.lists(hows, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_neighbours(hows: list[How], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(hows), 2000)).astype(np.float32)
    together = draw(logits, hows)
    assert together == [draw(logits[row : row + 1], [how])[0] for row, how in enumerate(hows)]


@pytest.mark.parametrize(
    "how",
    [
        How(),
        How(temperature=0.5),
        How(temperature=2.0),
        How(top_k=5),
        How(top_p=0.7),
        How(min_p=0.2),
        How(temperature=1.5, min_p=0.05, top_k=9, top_p=0.9),
    ],
)
def test_frequencies_are_those_of_the_filtered_softmax(how: How) -> None:
    count = 20_000
    logits = np.random.default_rng(4).normal(0, 1.5, 20)
    expected = filtered(logits, how) * count
    ids = draw(np.tile(logits, (count, 1)), [how._replace(position=position) for position in range(count)])
    observed = np.bincount(ids, minlength=20)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    chi_square = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees = kept.sum() - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees), "further off than four standard deviations"


def test_greedy_takes_the_largest_and_the_lowest_of_equals() -> None:
    logits = [[0.0, 3.0, 3.0, 1.0], [7.0, 7.0, 7.0, 7.0], [-5.0, -4.0, -3.0, -2.0]]
    assert draw(logits, [How(temperature=0.0)] * 3) == [1, 0, 3]


def test_greedy_ignores_filters_and_numbers() -> None:
    logits = np.random.default_rng(0).normal(0, 1, (50, 100))
    hows = [How(temperature=0.0, top_p=0.1, top_k=3, min_p=0.5, key=row) for row in range(50)]
    assert draw(logits, hows) == logits.argmax(1).tolist()


def test_equal_logits_at_a_threshold_are_all_kept() -> None:
    logits = np.array([1.0, 2.0, 2.0, 2.0, 0.0])
    for how in (How(top_k=1), How(top_k=2), How(top_p=0.2), How(min_p=1.0)):
        ids = draw(np.tile(logits, (300, 1)), [how._replace(position=position) for position in range(300)])
        assert set(ids) == {1, 2, 3}


def test_banned_ids_are_never_picked() -> None:
    logits = np.tile([9.0, 1.0, 5.0, 8.0], (100, 1))
    hows = [How(temperature=row % 2, position=row) for row in range(100)]
    ids = draw(logits, hows, banned=[(row, (0, 3)) for row in range(99)])
    assert set(ids[:99]) <= {1, 2}
    assert ids[99] in {0, 3}


def test_the_largest_number_still_picks_a_token_that_is_possible() -> None:
    assert uniforms(np.array([0], np.uint64), np.array([LAST_POSITION])) == [1 - 2**-25]
    logits = np.array([2.0, 1.0, 3.0, -1000.0, -1000.0])
    assert draw([logits], [How(key=0, position=LAST_POSITION)]) == [2]


def test_rows_that_are_not_finite_are_marked() -> None:
    for how in (How(temperature=0.0), How(), How(top_p=0.5), How(top_k=2, min_p=0.1, top_p=0.9)):
        assert draw(BROKEN, [how] * len(BROKEN)) == [*[NOT_FINITE] * (len(BROKEN) - 1), 2], "the last row is healthy"


def test_extreme_temperatures() -> None:
    logits = [[1.0, 2.0, 3.0]] * 2
    assert draw(logits, [How(temperature=1e-30), How(temperature=1e-6)]) == [2, 2]
    assert draw([[3e38, -3e38, 0.0]], [How(temperature=1e30, position=3)])[0] in {0, 1, 2}


def test_numbers_are_uniform_and_differ_by_key_and_position() -> None:
    key = sequence_key(seed=7, prompt_index=0, choice_index=0)
    numbers = uniforms(np.full(50_000, key, np.uint64), np.arange(50_000))
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 49 + 4 * math.sqrt(2 * 49)
    other = uniforms(np.full(50_000, key + 1, np.uint64), np.arange(50_000))
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.02


def test_keys_differ_by_seed_prompt_and_choice() -> None:
    keys = {
        sequence_key(seed, prompt, choice) for seed in (0, 1, 2**64 - 1) for prompt in range(20) for choice in range(20)
    }
    assert len(keys) == 3 * 20 * 20
    assert all(0 <= key < 2**64 for key in keys)
    assert sequence_key(1, 2, 3) == 0xD0734750FDE362B3, "recovered sequences need the same key in every release"
