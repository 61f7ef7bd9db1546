"""Virtual time: actions run in the order of their times, without waiting."""

import heapq
from collections.abc import Callable


class Clock:
    """Runs actions in the order of their times; actions of the same time run in the order in which they were added.

    Attributes:
        now: seconds of virtual time.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None:
        """Schedules a call of `action` for the time `when`."""
        heapq.heappush(self._events, (when, self._count, action, arguments))
        self._count += 1

    def run(self) -> None:
        """Runs all actions, and those that they add."""
        while self._events:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
