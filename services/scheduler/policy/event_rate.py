"""The rate of events of one kind."""

import math

TAU = 10.0
"""Time constant in seconds: an event that happened so long ago counts 1/e."""


class EventRate:
    """Events per second, as an exponential moving average. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._last = now
        self._count = 0.0

    def add(self, events: int, now: float) -> None:
        """Records that `events` events have just happened."""
        self._count = self._count * math.exp((self._last - now) / TAU) + events
        self._last = now

    def at(self, now: float) -> float:
        """Returns the rate; 0 before any time has passed. A short past is extrapolated."""
        weight = TAU * -math.expm1((self._since - now) / TAU)
        return self._count * math.exp((self._last - now) / TAU) / weight if weight > 0 else 0.0
