"""Waits for conditions that have no event."""

import asyncio
from collections.abc import Callable

INTERVAL = 0.02
"""Seconds between two evaluations of a condition."""


async def poll(condition: Callable[[], object]) -> None:
    """Returns once `condition` holds. It is for rare waits, such as those of a drain."""
    while not condition():  # noqa: ASYNC110 - the condition has no event
        await asyncio.sleep(INTERVAL)
