"""Waiting for a condition; no test depends on how fast the machine is."""

import asyncio
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds that a test waits for what must come, and that its requests have: only a hang takes so long anywhere."""


async def until(condition: Callable[[], object]) -> None:
    """Returns once `condition` holds; asks after every turn of the loop, a few hundred times a second.

    Raises:
        TimeoutError: it does not hold after `PATIENCE`.
    """
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # not every condition has an event
            await asyncio.sleep(0.003)
