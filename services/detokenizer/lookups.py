"""What handlers start because it has to wait for something: a bounded set of tasks."""

import asyncio
from collections.abc import Coroutine

MAX = 1024
"""Tasks at once."""


class Lookups:
    """Runs coroutines, as long as there are not too many of them."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running = 0

    @property
    def full(self) -> bool:
        """Whether nothing more can be started."""
        return self._running >= MAX

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work`. The caller has looked at `full`."""
        self._running += 1
        self._tasks.create_task(work).add_done_callback(self._ended)

    def _ended(self, _: "asyncio.Task[None]") -> None:
        self._running -= 1
