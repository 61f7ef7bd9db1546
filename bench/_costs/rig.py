"""The interface between the meter and a service with everything around it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from pagewire.bench._costs.progress import Progress
from pagewire.bench._costs.tap import Wrap
from pagewire.shared.process.context import Service

ROWS = 256
"""Sequences, streams or requests at once."""


class Rig(Protocol):
    """A service with everything around it. One turn is a few milliseconds of its work.

    Attributes:
        per_message: units of each message that is fed to a handler of the service.
    """

    per_message: float

    def prepare(self) -> None:
        """Makes the input of the next turn, outside of the measurement."""

    async def turn(self) -> float:
        """Has the service process the input; returns the number of units."""


Open = Callable[[Wrap], AbstractAsyncContextManager[Rig]]
"""Opens a rig; the handler that it feeds is wrapped."""


@asynccontextmanager
async def serving(service: Service, progress: Progress, ready: Callable[[], bool]) -> AsyncIterator[None]:
    """Runs a service until the block ends, which begins once `ready` holds; `progress` has to be notified of that."""
    task = asyncio.create_task(service.run())
    task.add_done_callback(lambda _: progress.notify())
    try:
        await progress.until(lambda: task.done() or ready())
        if task.done():
            task.result()
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
