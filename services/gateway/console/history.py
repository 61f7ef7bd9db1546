"""Rates, load and latencies of the last ten minutes, sampled every five seconds from what the gateway knows anyway."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from pagewire.services.gateway.routes.health import Health
from pagewire.services.gateway.routes.request_log import LoggedRequest, RequestLog

SAMPLE_INTERVAL = 5.0
"""Seconds between two samples."""
SAMPLES = 120
"""Samples that are kept: ten minutes."""


class History:
    """The latest samples, oldest first."""

    def __init__(self, health: Health, requests: RequestLog) -> None:
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self._health = health
        self._requests = requests
        self._totals: dict[str, tuple[float, float]] = {}
        """By executor: tokens sampled and positions of prompts so far."""
        self._sampled_at = time.time()
        self._newest = 0.0
        """Time of the last sample that was taken as new."""

    async def run(self) -> None:
        """Samples until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL)
            self.sample(time.time())

    def sample(self, now: float) -> None:
        """Adds a sample."""
        seconds = max(now - self._sampled_at, 1e-3)
        beats = self._health.alive()
        totals = {
            beat.instance: (beat.load.get("sampled", 0.0), beat.load.get("prefilled", 0.0))
            for beat in beats
            if beat.service == "executor"
        }
        growth = [
            (sampled - before[0], prefilled - before[1])
            for instance, (sampled, prefilled) in totals.items()
            if (before := self._totals.get(instance))
        ]
        requests = self._requests.ended_since(self._sampled_at)
        self.samples.append(
            {
                "at": round(now, 1),
                "tokens": round(sum(sampled for sampled, _ in growth) / seconds, 1),
                "prompt_tokens": round(sum(prefilled for _, prefilled in growth) / seconds, 1),
                "running": sum(beat.load.get("running", 0.0) for beat in beats if beat.service == "scheduler"),
                "waiting": sum(
                    beat.load.get("waiting", 0.0) + beat.load.get("queued", 0.0)
                    for beat in beats
                    if beat.service == "scheduler"
                ),
                "first_token_ms": quantiles(
                    [value for each in requests if (value := first_token_ms(each)) is not None]
                ),
                "next_token_ms": quantiles([value for each in requests if (value := next_token_ms(each)) is not None]),
            }
        )
        self._totals, self._sampled_at = totals, now

    def take_new(self) -> dict[str, Any] | None:
        """Returns the last sample, if it is newer than the last one that was taken."""
        if not self.samples or self.samples[-1]["at"] <= self._newest:
            return None
        self._newest = self.samples[-1]["at"]
        return self.samples[-1]


def first_token_ms(request: LoggedRequest) -> float | None:
    """Returns the milliseconds from a request to its first token; None: unknown."""
    if request.first_token:
        return (request.first_token - request.began) * 1000
    metrics = request.metrics
    if metrics is None or metrics.queued_time is None or metrics.prefill_time is None:
        return None
    return (metrics.queued_time + metrics.prefill_time) * 1000


def next_token_ms(request: LoggedRequest) -> float | None:
    """Returns the mean milliseconds from one token to the next; None: unknown, or there is one token."""
    metrics = request.metrics
    if metrics is None or metrics.decode_time is None or request.tokens < 2:
        return None
    return metrics.decode_time * 1000 / (request.tokens - 1)


def quantiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the median and the 95th percentile; None without values.

    >>> quantiles([4.0, 1.0, 2.0])
    (2.0, 4.0)
    """
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[len(ordered) // 2], 2), round(ordered[len(ordered) * 95 // 100], 2)
