"""A limit to the tasks that wait for something outside the process."""

import asyncio
from collections.abc import Coroutine

MAX_TASKS = 1024
"""Maximum number of tasks, each of a request that waits for something such as a record."""


class BoundedTaskGroup:
    """Starts tasks in a task group, up to `MAX_TASKS` at once."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running = 0

    @property
    def full(self) -> bool:
        """Whether no more tasks can be started."""
        return self._running >= MAX_TASKS

    def start(self, work: Coroutine[None, None, None]) -> bool:
        """Starts a task; returns False, and drops `work`, if the group is full."""
        if self.full:
            work.close()
            return False
        self._running += 1
        self._tasks.create_task(work).add_done_callback(self._ended)
        return True

    def _ended(self, _: "asyncio.Task[None]") -> None:
        self._running -= 1
