"""Estimates how many requests per second a replica can start while all of its slots are in use. Pure.

A slot becomes free when a request ends, so the rate of starts is the number of slots divided by the time that a request
holds one (Little, A proof for the queuing formula L = lambda W, 1961). That time is the number of tokens of a request
divided by the tokens per second of a slot. Tokens are generated all the time, whereas requests that have begun together
end together: counted tokens give the rate long before the first request ends, and without its jumps.

Only time in which at least half of the slots are in use counts, since a slot is faster while others are empty. The rate
of such times is kept while there is less to do.
"""

import math

TAU = 10.0
"""Time constant in seconds: an observation so much loaded time ago counts 1/e."""
RECENT = 128
"""Requests, counted from the last that ended, whose lengths count."""
KNOWN_AFTER = 1.0
"""Seconds of loaded time before which no rate is known: steps with many prompts say nothing about the later ones."""


class ServiceRate:
    """The rate of one replica.

    Attributes:
        concurrency: sequences that run at once under load: the number of slots, or less where the blocks of the pool or
            the prompts in progress do not allow as many.

    >>> rate = ServiceRate(slots=8)
    >>> rate.observe(seconds=2.0, running=8, tokens=320, waiting=True)  # a slot generates 20 tokens per second
    >>> rate.end(tokens=40)  # so a request holds it for 2 seconds
    >>> rate.starts_per_second(generated=20.0)
    4.0
    """

    def __init__(self, slots: int) -> None:
        self.concurrency = float(slots)
        self._loaded = 0.0
        self._slot_seconds = 0.0
        self._tokens = 0.0
        self._ended = 0.0
        self._ended_tokens = 0.0

    def observe(self, seconds: float, running: int, tokens: int, *, waiting: bool) -> None:
        """Records that `running` sequences have generated `tokens` tokens in `seconds` seconds.

        `waiting`: whether other sequences waited for a slot.
        """
        keep = math.exp(-seconds / TAU)
        if running > self.concurrency:
            self.concurrency = float(running)
        elif waiting:
            self.concurrency = max(1.0, running + (self.concurrency - running) * keep)
        if running and 2 * running >= self.concurrency:
            self._loaded += seconds
            self._slot_seconds = self._slot_seconds * keep + running * seconds
            self._tokens = self._tokens * keep + tokens

    def end(self, tokens: int) -> None:
        """Records that a request has ended which had a slot and generated `tokens` tokens."""
        keep = 1 - 1 / RECENT
        self._ended = self._ended * keep + 1
        self._ended_tokens = self._ended_tokens * keep + tokens

    def starts_per_second(self, generated: float) -> float:
        """Returns the rate; 0 while it is unknown.

        `generated` is the mean number of tokens that the running requests have generated so far. Until requests end, it
        is all that is known about their length. Later it shows when requests have become longer than those that have
        ended: on average, a running request has generated half of its tokens or less.
        """
        length = max(self._length, generated / 2) if self._ended else generated
        if self._loaded < KNOWN_AFTER or not self._tokens or not length:
            return 0.0
        return self.concurrency * (self._tokens / self._slot_seconds) / length

    def youth(self, generated: float) -> float:
        """Returns the share of a request's time by which the running requests are younger than usual.

        Running requests that have begun one after the other have generated half of their tokens, on average. Requests
        that have begun together do not end for a while.
        """
        return max(0.0, 0.5 - generated / self._length) if self._length else 0.0

    @property
    def _length(self) -> float:
        """Mean number of tokens of the requests that have ended."""
        return self._ended_tokens / self._ended if self._ended else 0.0
