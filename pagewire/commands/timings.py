"""How fast an answer came, as its reader saw it."""

import time
from collections.abc import Callable


class Timings:
    """Counts the tokens of one answer, from the moment in which it is made.

    Args:
        clock: seconds.

    Attributes:
        tokens: how many have come.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent = self._first = self._last = clock()
        self.tokens = 0

    def count(self, tokens: int) -> None:
        """Notes that tokens have come at this moment."""
        self._last = self._clock()
        if not self.tokens:
            self._first = self._last
        self.tokens += tokens

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self._first - self._sent

    @property
    def rate(self) -> float:
        """Tokens per second behind the first; 0.0 where there are none."""
        took = self._last - self._first
        return (self.tokens - 1) / took if took > 0 else 0.0

    def __str__(self) -> str:
        shown = f"time to first token {self.first * 1000:.0f} ms, {self.tokens} token{'s' * (self.tokens != 1)}"
        return f"{shown}, {self.rate:.1f} tokens/s" if self.rate else shown
