"""Chooses the number of drafted tokens of each row that maximises the expected tokens per second."""

from collections.abc import Sequence

import numpy as np

from pagewire.services.executor.devices.protocol import Float64

LEAST_GAIN = 1.04
"""Ratio of the tokens per second with drafts to those without, below which a step verifies none: times are not known
more exactly."""


def choose(survivals: Sequence[Sequence[float]], sampling: int, seconds: Float64) -> list[int]:
    """Returns how many of its drafted tokens each row verifies.

    A step brings a token of each row that samples, and each drafted token with its chance. The likeliest ones are
    verified, as many as make the ratio of tokens to time largest, and no more than `seconds` has times for.

    Args:
        survivals: for each row, the chance of each drafted token that it is accepted; never growing.
        sampling: rows of the step that sample.
        seconds: [drafted tokens + 1] time of the step with none of them, one, two, and so on.

    >>> choose([[0.9, 0.8], [0.1]], sampling=2, seconds=np.array([10.0, 11.0, 12.0, 13.0]))
    [2, 0]
    """
    owners = np.repeat(np.arange(len(survivals)), [len(row) for row in survivals])
    chances = np.array([chance for row in survivals for chance in row])
    order = np.argsort(-chances, kind="stable")
    tokens = sampling + np.concatenate(([0.0], chances[order].cumsum()))
    rates = tokens[: len(seconds)] / seconds
    count = int(rates.argmax())
    if rates[count] < LEAST_GAIN * rates[0]:
        count = 0
    chosen: list[int] = np.bincount(owners[order[:count]], minlength=len(survivals)).tolist()
    return chosen
