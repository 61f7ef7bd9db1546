"""What is measured, and how a service is kept running meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from pagewire.bench._costs.progress import Progress
from pagewire.bench._costs.tap import Wrap
from pagewire.shared.context import Service

ROWS = 256
"""Sequences, streams or requests at once."""


class Rig(Protocol):
    """A service with everything around it. One turn is a few milliseconds of its work.

    Attributes:
        per_message: units of each message that is fed to a handler of the service.
    """

    per_message: float

    def prepare(self) -> None:
        """Makes the input of the next turn. Not measured."""

    async def turn(self) -> float:
        """Has the input worked off, and returns how many units that was."""


Open = Callable[[Wrap], AbstractAsyncContextManager[Rig]]
"""Opens a rig; the handler that it feeds is wrapped."""


@asynccontextmanager
async def serving(service: Service, progress: Progress, ready: Callable[[], bool]) -> AsyncIterator[None]:
    """Runs a service, from the moment when `ready` holds until the block ends. `progress` hears its announcements."""
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
