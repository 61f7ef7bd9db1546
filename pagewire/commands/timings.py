"""The speed of an answer, as its reader sees it."""

import time
from collections.abc import Callable


class Timings:
    """Counts the tokens of one answer. Its clock starts when it is created.

    Args:
        clock: returns the time in seconds.

    Attributes:
        tokens: number of tokens so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent = self._first = self._last = clock()
        self.tokens = 0

    def count(self, tokens: int) -> None:
        """Counts tokens that arrive now."""
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
        """Tokens per second after the first one; 0.0 without any."""
        seconds = self._last - self._first
        return (self.tokens - 1) / seconds if seconds > 0 else 0.0

    def __str__(self) -> str:
        text = f"time to first token {self.first * 1000:.0f} ms, {self.tokens} token{'s' * (self.tokens != 1)}"
        return f"{text}, {self.rate:.1f} tokens/s" if self.rate else text
