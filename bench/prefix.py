"""What the prefix cache costs where no two prompts share anything: its part of the scheduler's time.

The scheduler's own policy serves ShareGPT lengths on a simulated H100, in virtual time; what is taken is the real time
that the policy needs, and that of the prefix cache within it, less what taking the time costs.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from pagewire.bench._loads import poisson, sharegpt
from pagewire.bench._report import markdown
from pagewire.bench._systems import System, Variant, pipeline
from pagewire.services.scheduler.policy import Policy
from pagewire.services.scheduler.prefix_cache import PrefixCache

SYSTEM = System("llama-3-8b", "h100", 1, 8192)
HEADER = ("simulated", "requests", "hits", "scheduling ms", "of it the prefix cache", "share")
_CALIBRATION = 100_000


@dataclass(slots=True)
class Stopwatch:
    """Time spent in some functions."""

    seconds: float = 0.0
    calls: int = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return timed


@dataclass(frozen=True, slots=True)
class Figures:
    """One run."""

    requests: int
    hits: int
    """Prompt tokens that were found in the cache."""
    scheduling: float
    """Seconds in the policy."""
    caching: float
    """Seconds of these in the prefix cache."""

    @property
    def share(self) -> float:
        """The cache's part."""
        return self.caching / self.scheduling


def main(arguments: list[str]) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="pagewire bench prefix", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="requests of each run")
    parser.add_argument("--qps", type=float, nargs="+", default=[8.0, 32.0, math.inf], help="arrivals per second")
    given = parser.parse_args(arguments)
    rows = []
    for qps in given.qps:
        figures = measure(qps, given.requests)
        times = (f"{seconds * 1e3:.1f}" for seconds in (figures.scheduling, figures.caching))
        rows.append([f"{qps:g} QPS", str(figures.requests), str(figures.hits), *times, f"{figures.share:.2%}"])
    print("\n".join(markdown(HEADER, rows)))
    return 0


def measure(qps: float, requests: int, seed: int = 0) -> Figures:
    """One run. `qps` are arrivals per virtual second."""
    within, whole = _overhead()
    policy, cache = Stopwatch(), Stopwatch()
    with _timed(policy, Policy, "on_step", "schedule"), _timed(cache, PrefixCache, *_public(PrefixCache)):
        trace = pipeline(SYSTEM, Variant()).run(poisson(sharegpt, qps, requests, seed))
    caching = cache.seconds - cache.calls * within
    scheduling = policy.seconds - policy.calls * within - cache.calls * whole
    return Figures(len(trace.requests), sum(request.cached for request in trace.requests), scheduling, caching)


def _public(cls: type) -> list[str]:
    return [name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]


@contextmanager
def _timed(watch: Stopwatch, cls: type, *names: str) -> Iterator[None]:
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(patch.object(cls, name, watch.around(getattr(cls, name))))
        yield


def _overhead() -> tuple[float, float]:
    """Seconds that a call takes longer by being timed: as its stopwatch sees it, and in all."""
    watch = Stopwatch()
    timed = watch.around(lambda: None)
    began = time.perf_counter()
    for _ in range(_CALIBRATION):
        timed()
    return watch.seconds / _CALIBRATION, (time.perf_counter() - began) / _CALIBRATION
