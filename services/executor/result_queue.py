"""Results on their way from the step thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ResultQueue(Generic[T]):
    """Delivers on the event loop, in order, what a thread puts in. Several results share one wake-up.

    It needs no bound of its own: the step loop puts in at most one result per step of its lease and per plan.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[T], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._results: deque[T] = deque()
        self._woken = False

    def put(self, result: T) -> None:
        """Called on the thread; returns at once."""
        self._results.append(result)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._woken = False  # before looking: what is put in from here on wakes the loop again
        while self._results:
            self._deliver(self._results.popleft())
