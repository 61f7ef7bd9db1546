"""Waiting for a condition, with a deadline."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    """Returns once `condition` holds; asks after every turn of the loop, a few hundred times a second.

    Raises:
        AssertionError: it does not hold after `timeout` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while not condition():
        assert loop.time() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.003)
