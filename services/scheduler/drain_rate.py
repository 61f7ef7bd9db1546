"""How fast requests end, which tells a refused client when to try again."""

import math

TAU = 10.0
"""Time constant in seconds: a request that ended so long ago counts 1/e."""


class DrainRate:
    """Requests that end per second, as an exponential moving average. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._last = now
        self._count = 0.0

    def add(self, requests: int, now: float) -> None:
        """Records that `requests` requests have just ended."""
        self._count = self._count * math.exp((self._last - now) / TAU) + requests
        self._last = now

    def at(self, now: float) -> float:
        """Returns the rate; 0 before any time has passed. A short past is extrapolated."""
        weight = TAU * -math.expm1((self._since - now) / TAU)
        return self._count * math.exp((self._last - now) / TAU) / weight if weight > 0 else 0.0
