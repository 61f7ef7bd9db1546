"""Waiting for what nobody announces."""

import asyncio
from collections.abc import Callable

INTERVAL = 0.02
"""Seconds between two looks."""


async def poll(condition: Callable[[], object]) -> None:
    """Returns once `condition` holds. For waits that are rare, such as those of a drain."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(INTERVAL)
