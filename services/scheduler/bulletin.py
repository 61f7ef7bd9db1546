"""Tells the tokenizers which prefixes are cached here."""

import asyncio
import time
from collections.abc import Callable

import structlog

from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError
from pagewire.shared.messages import encode
from pagewire.shared.messages.prefixes import CachedPrefixes

EVERY = 0.5
"""Seconds between two looks at what has changed."""
AGAIN = 5.0
"""Seconds after which the same is said again, for tokenizers that have just come."""

_log = structlog.get_logger()


async def publish(bus: Bus, subject: str, current: Callable[[], CachedPrefixes | None]) -> None:
    """Publishes what is `current` until cancelled; None: there is nothing to tell."""
    last, sent = b"", 0.0
    while True:
        prefixes, now = current(), time.monotonic()
        if prefixes is not None and ((data := encode(prefixes)) != last or now - sent > AGAIN):
            try:
                bus.publish(subject, data)
                last, sent = data, now
            except BusError as error:
                _log.debug("prefixes_not_sent", reason=str(error))
        await asyncio.sleep(EVERY)
