"""When a client that is refused should come back. Pure."""

from collections.abc import Iterable

from pagewire.shared.messages.heartbeat import Heartbeat

SHORTEST_MS = 250
LONGEST_MS = 30_000
WELCOME = 64
"""Requests that may wait when the client is back: so many begin soon."""


def retry_after_ms(schedulers: Iterable[Heartbeat]) -> int:
    """Milliseconds until no more than `WELCOME` requests wait, at the rate at which requests end now.

    `LONGEST_MS` while none end.
    """
    loads = [beat.load for beat in schedulers]
    beyond = max(1.0, sum(load.get("queued", 0.0) for load in loads) - WELCOME)
    rate = sum(load.get("drain_rate", 0.0) for load in loads)
    if rate * LONGEST_MS <= beyond * 1000:
        return LONGEST_MS
    return max(SHORTEST_MS, round(beyond * 1000 / rate))
