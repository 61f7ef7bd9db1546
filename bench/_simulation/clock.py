"""Virtual time: what happens when, without waiting for it."""

import heapq
from collections.abc import Callable


class Clock:
    """Runs actions in the order of their times; those of the same time, in the order in which they were asked for.

    Attributes:
        now: seconds of virtual time.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None:
        """Has `action` called at the time `when`."""
        heapq.heappush(self._events, (when, self._count, action, arguments))
        self._count += 1

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
