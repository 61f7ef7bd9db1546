"""What a new request waits for where the connection is lost."""

import asyncio
from contextlib import suppress

from pagewire.shared.bus import Bus

RECONNECT_TIMEOUT = 5.0
"""Seconds for which a new request waits for a lost connection: its broker may stand still, or move."""


async def wait_connected(bus: Bus) -> None:
    """Returns once there is a connection, or after `RECONNECT_TIMEOUT` seconds."""
    if not bus.connected:
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_TIMEOUT):
                await bus.wait_connected()
