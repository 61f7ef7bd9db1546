"""Publishes to the tokenizers which prefixes are cached here."""

import asyncio
import time
from collections.abc import Callable

import structlog

from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError
from pagewire.shared.messages import encode
from pagewire.shared.messages.prefixes import CachedPrefixes

CHECK_EVERY = 0.5
"""Seconds between two checks for changes."""
REPEAT_AFTER = 5.0
"""Seconds after which unchanged prefixes are published again, for tokenizers that have just started."""

_log = structlog.get_logger()


async def advertise_prefixes(bus: Bus, subject: str, current: Callable[[], CachedPrefixes | None]) -> None:
    """Publishes the result of `current` when it changes, until cancelled; None is not published."""
    last, sent = b"", 0.0
    while True:
        prefixes, now = current(), time.monotonic()
        if prefixes is not None and ((data := encode(prefixes)) != last or now - sent > REPEAT_AFTER):
            try:
                bus.publish(subject, data)
                last, sent = data, now
            except BusError as error:
                _log.debug("prefixes_not_sent", reason=str(error))
        await asyncio.sleep(CHECK_EVERY)
