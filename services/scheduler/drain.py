"""How fast requests end: what a client that is refused has to wait for."""

import math

TAU = 10.0
"""Seconds by which a request that ended counts for less than half: e to the power of minus one."""


class DrainRate:
    """Requests that end per second, an average that forgets exponentially. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._last = now
        self._count = 0.0

    def ended(self, requests: int, now: float) -> None:
        """So many have just ended."""
        self._count = self._count * math.exp((self._last - now) / TAU) + requests
        self._last = now

    def at(self, now: float) -> float:
        """The rate; 0 before any time has passed. A short past counts as if it had always been so."""
        weight = TAU * -math.expm1((self._since - now) / TAU)
        return self._count * math.exp((self._last - now) / TAU) / weight if weight > 0 else 0.0
