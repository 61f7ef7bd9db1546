"""The tasks of the requests in progress, bounded in number and bytes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

MAX_REQUESTS = 4096
"""Maximum number of requests in progress."""
MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of their bodies together."""


class RequestTasks:
    """One task per request."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def has_room(self, size: int) -> bool:
        """Returns whether a request of `size` bytes may start."""
        return len(self._tasks) < self._max_requests and self._bytes + size <= self._max_bytes

    def start(self, work: Coroutine[Any, Any, None], size: int, failed: Callable[[BaseException], None]) -> None:
        """Starts the task of a request of `size` bytes. `failed` is called with an error that the task raises."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        self._bytes += size

        def on_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._bytes -= size
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failed(error)

        task.add_done_callback(on_end)

    async def wait(self) -> None:
        """Waits until no request is in progress."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def drain(self, timeout: float) -> None:
        """Waits for the requests in progress, and cancels them after `timeout` seconds."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
