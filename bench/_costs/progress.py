"""Waits for a service to reach a condition."""

import asyncio
from collections.abc import Callable

_PATIENCE = 30.0
"""Seconds until a wait fails: far more than it takes, for a busy machine."""


class Progress:
    """Wakes the measurement once a condition holds, without polling, which would cost CPU time."""

    def __init__(self) -> None:
        self._condition: Callable[[], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Checks the condition anew."""
        if self._waiter is not None and not self._waiter.done() and self._condition is not None and self._condition():
            self._waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` holds, which is checked now and at every `notify`.

        Raises:
            TimeoutError: it does not come true.
        """
        self._condition = condition
        self._waiter = asyncio.get_running_loop().create_future()
        self.notify()
        async with asyncio.timeout(_PATIENCE):
            await self._waiter
