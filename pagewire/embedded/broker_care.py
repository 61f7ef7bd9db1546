"""Keeps the embedded brokers running: restarts those that have died, and those whose disk was full."""

import asyncio

import structlog

from pagewire.embedded.broker import Broker
from pagewire.shared.errors import BusUnavailable

ROOM_CHECK_INTERVAL = 0.5
"""Seconds between two checks whether a full disk has room again."""
RETRY_DELAY = 0.2
"""Seconds between two attempts to restart a broker."""

_log = structlog.get_logger()


async def keep_running(broker: Broker) -> None:
    """Restarts the broker whenever it dies, on the same port and with the same store."""
    while True:
        code = await broker.wait()
        _log.warning("broker_ended", code=code)
        try:
            await broker.start()
        except (BusUnavailable, OSError) as error:  # its folder may be on a full disk
            _log.warning("broker_not_started", reason=str(error), retry_in=RETRY_DELAY)
            await asyncio.sleep(RETRY_DELAY)


async def end_broken(broker: Broker) -> None:
    """Ends the broker when its disk was full and has room again. JetStream would store nothing without a restart."""
    while True:
        await broker.wait_broken()
        _log.error("broker_disk_full")
        while True:
            await asyncio.sleep(ROOM_CHECK_INTERVAL)
            if await asyncio.to_thread(broker.has_room):
                break
        _log.warning("broker_disk_has_room")
        broker.terminate()
        await broker.wait()
        await asyncio.sleep(RETRY_DELAY)  # the restart clears the failure
