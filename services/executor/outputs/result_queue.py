"""The queue of results from the step thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ResultQueue(Generic[T]):
    """Delivers the results of a thread on the event loop, in order. Several results share one wake-up.

    The queue needs no bound, because the step loop adds at most one result per step of its lease and per plan.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[T], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._results: deque[T] = deque()
        self._woken = False

    def put(self, result: T) -> None:
        """Adds a result and returns at once. The thread calls this method."""
        self._results.append(result)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._woken = False  # cleared first, so that a result added from here on wakes the loop again
        while self._results:
            self._deliver(self._results.popleft())
