"""Learns the time of a step by its number of positions, from the steps that have run."""

import numpy as np

from pagewire.services.executor.devices.protocol import Float64, Int64

SIZES: Int64 = np.array(
    [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 512, 1024]
)
"""Numbers of positions; steps are counted together that are nearest to one of them."""
MAX_POSITIONS = 1024
"""Largest number of positions in the table; steps of more have its time."""
QUANTILE = 0.3
"""Share of the steps of a size that were shorter than the time that counts: longer ones have waited for another
program."""
PACE = 0.04
"""Share of a time by which it follows one step, at least."""
REFRESH = 16
"""Steps between two tables."""
LEAST_STEPS = 3
"""Steps of a size from which on its time counts: a single slow one would keep that size from being tried again. The
largest size always counts."""
FADING = 0.99
"""Factor of the number of steps of each size at each new table: a size that has not run for long is tried again."""


def increasing(times: Float64, weights: Float64) -> Float64:
    """Returns the non-decreasing seconds [N] that are nearest to `times` [N] by squares with these `weights` [N].

    This is isotonic regression by the pool-adjacent-violators algorithm (Ayer et al., 1955).

    >>> increasing(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[list[float]] = []  # mean, weight and number of times of neighbours that became equal
    for time, weight in zip(times.tolist(), weights.tolist(), strict=True):
        pools.append([time, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, more, count = pools.pop()
            pool = pools[-1]
            pool[0] = (pool[0] * pool[1] + mean * more) / (pool[1] + more)
            pool[1] += more
            pool[2] += count
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])


class StepCost:
    """The usual time of steps by their positions: a line between two sizes that have run, and it never falls.

    Below the smallest size that has run, and beyond the largest one, a position costs as much as one of that size on
    average: so drafts are tried only where they pay even then.
    """

    def __init__(self) -> None:
        self._times = np.zeros(len(SIZES))
        self._positions = np.zeros(len(SIZES))  # mean number of positions of the steps of each size
        self._counts = np.zeros(len(SIZES))
        self._index = np.abs(SIZES - np.arange(MAX_POSITIONS + 1)[:, None]).argmin(axis=1)
        self._observed = 0
        self._table: Float64 | None = None

    @property
    def observed(self) -> bool:
        """Whether any step has run."""
        return self._observed > 0

    def observe(self, positions: int, seconds: float) -> None:
        """Learns from a step of so many positions."""
        at = self._index[min(positions, MAX_POSITIONS)]
        count, time = self._counts[at], self._times[at]
        pace = max(PACE, 1 / (1 + count))
        if count:
            self._times[at] = time * (1 + pace * (QUANTILE if seconds > time else QUANTILE - 1))
        else:
            self._times[at] = seconds
        self._positions[at] += pace * (min(positions, MAX_POSITIONS) - self._positions[at])
        self._counts[at] = min(count + 1, 1 / PACE)
        self._observed += 1
        if self._observed % REFRESH == 0 or count < LEAST_STEPS:
            self._table = None
        if self._observed % REFRESH == 0:
            self._counts *= FADING

    def seconds(self, first: int, count: int) -> Float64:
        """Returns the times of steps of `first` positions and of the `count` next numbers [count + 1]. They are these
        numbers themselves before any step has run."""
        if self._table is None:
            self._table = self._fitted()
        if first + count <= MAX_POSITIONS:
            return self._table[first : first + count + 1]
        return self._table[np.minimum(np.arange(first, first + count + 1), MAX_POSITIONS)]

    def _fitted(self) -> Float64:
        """Returns the time of each number of positions [MAX_POSITIONS + 1]."""
        if not self._counts.any():
            return np.arange(MAX_POSITIONS + 1.0)
        known = self._counts >= min(LEAST_STEPS, self._counts.max())
        known[self._counts.nonzero()[0][-1]] = True
        positions = self._positions[known]
        times = increasing(self._times[known], self._counts[known])
        numbers = np.arange(MAX_POSITIONS + 1)
        below, beyond = numbers * times[0] / positions[0], numbers * times[-1] / positions[-1]
        between = np.interp(numbers, positions, times)
        table: Float64 = np.where(numbers < positions[0], below, np.where(numbers > positions[-1], beyond, between))
        return table
