"""DeepSpeed-FastGen's service levels and throughputs, as its benchmark code defines them.

Source: DeepSpeedExamples, benchmarks/inference/mii: `plot_effective_throughput.py` and `utils.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewire.bench._common.loads import Request

PROMPT_RATE = 512.0
"""Tokens of a prompt per second, within whose time the first token has to come."""
SPAN = 16
"""Span of the exponential moving average over token intervals."""


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Limits that a request has to keep."""

    rate: float
    """Tokens per second that the moving average has to exceed all the time."""

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.rate:g} tokens/s"

    def is_met(self, request: Request) -> bool:
        """Returns whether the first token was in time and every value of the average is faster than the rate."""
        if request.ttft > len(request.prompt) / PROMPT_RATE:
            return False
        return bool((moving_average(request.intervals) < 1 / self.rate).all())


FASTGEN = tuple(ServiceLevel(rate) for rate in (2.0, 4.0, 6.0))
"""The levels of FastGen's publication."""


def moving_average(values: Sequence[float], span: int = SPAN) -> npt.NDArray[np.float64]:
    """Returns pandas' `Series(values).ewm(span=span, adjust=True).mean()`: weights are (1 - 2 / (span + 1)) ** age."""
    decay = 1 - 2 / (span + 1)
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = value + decay * total, 1 + decay * weight
        means.append(total / weight)
    return np.array(means)


def makespan(requests: Sequence[Request]) -> float:
    """Returns the seconds from the first request's start to the last one's end."""
    return max(r.tokens_at[-1] for r in requests) - min(r.at for r in requests)


def throughput(requests: Sequence[Request]) -> float:
    """Returns the requests per second over the makespan, as FastGen's text defines it."""
    return len(requests) / makespan(requests)


def effective_throughput(requests: Sequence[Request], level: ServiceLevel) -> float:
    """Returns the requests per second that met the level, over the makespan."""
    return sum(level.is_met(request) for request in requests) / makespan(requests)


def token_intervals(requests: Sequence[Request]) -> list[float]:
    """Returns all intervals between tokens, without the requests that started first and last."""
    ordered = sorted(requests, key=lambda request: request.at)
    return [interval for request in ordered[1:-1] for interval in request.intervals]
