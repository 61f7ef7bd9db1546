"""The filters of a distribution by sorting all of it in double precision, and parameters to try them with."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from pagewire.shared.sampling_parameters import RECORD, Record, record
from tests.support.philox import uniforms

LAST_POSITION = 38471471
"""Position at which the sequence with key 0 has the largest number that there is, 1 - 2**-25."""
NAN, INF = math.nan, math.inf
BROKEN = [
    [NAN] * 4,
    [INF, NAN, 0.0, INF],
    [-INF] * 4,
    [1.0, NAN, 2.0, -INF],
    [1.0, INF, 2.0, 3.0],
    [0.0, -INF, 50.0, 0.0],
]
"""Logits of rows from which no token can be sampled, and of a last one from which only token 2 can."""


class Sampling(NamedTuple):
    """The sampling parameters of one row, its key and the position that it samples."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    key: int = 1
    position: int = 0


def records(samplings: Sequence[Sampling]) -> Record:
    """The parameters of the rows as a device gets them."""
    table = np.tile(record(), len(samplings))
    for name in set(Sampling._fields) & set(RECORD.names or ()):
        table[name] = [getattr(sampling, name) for sampling in samplings]
    return table


def filtered(logits: npt.NDArray[np.float64], sampling: Sampling, slack: float = 0.0) -> npt.NDArray[np.float64]:
    """The probabilities that are left, from sorting everything, in double precision.

    `slack` moves the thresholds by so much, relatively: tokens within it are decided by rounding.
    """
    weights: npt.NDArray[np.float64] = np.exp((logits - logits.max()) / sampling.temperature)
    weights[weights < min(sampling.min_p * (1 + slack), 1.0)] = 0.0
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.sort(weights)[-sampling.top_k]] = 0.0
    if sampling.top_p < 1:
        falling = np.sort(weights)[::-1]
        reached = np.cumsum(falling)
        last = int(np.searchsorted(reached, sampling.top_p * (1 + slack) * reached[-1]))
        weights[weights < falling[min(last, len(falling) - 1)]] = 0.0
    total: np.float64 = weights.sum()
    return weights / total


def possible(logits: npt.NDArray[np.float64], sampling: Sampling) -> set[int]:
    """The tokens that exact arithmetic picks, and those that it would pick but for rounding."""
    (number,) = uniforms(np.array([sampling.key], np.uint64), np.array([sampling.position]))
    tokens: set[int] = set()
    for slack in (-1e-5, 0.0, 1e-5):
        weights = filtered(logits, sampling, slack)
        ends = np.cumsum(weights)
        starts = ends - weights
        tokens.update(np.flatnonzero((weights > 0) & (starts <= number + 1e-5) & (ends >= number - 1e-5)).tolist())
    return tokens


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.1, 3.0),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    top_k=st.one_of(st.just(0), st.integers(1, 5000)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    key=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
)
