"""Compares the clock of this machine with the broker's, which all deadlines of requests are counted by."""

import asyncio
from collections.abc import Iterator

import structlog

from pagewire.shared.bus import Store
from pagewire.shared.errors import BusError
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample

INTERVAL = 5.0
"""Seconds between two comparisons."""
RETRY_INTERVAL = 0.5
"""Seconds until the next attempt while the broker has not answered yet."""
LARGE = 1.0
"""Seconds of difference that are logged: log lines and spans of several machines are then out of order."""

_log = structlog.get_logger()


class ClockMonitor:
    """Keeps the store's `now` right.

    Attributes:
        offset: seconds by which the broker's clock is ahead; None: it has not been read yet.
    """

    def __init__(self, store: Store) -> None:
        self.offset: float | None = None
        self._store = store

    async def run(self) -> None:
        """Compares until cancelled."""
        logged = 0.0
        while True:
            try:
                self.offset = await self._store.read_clock()
            except BusError:
                pass  # the clock that was read last goes on
            else:
                if abs(self.offset - logged) > LARGE:
                    logged = self.offset
                    _log.warning("clock_differs", broker_ahead_s=round(self.offset, 3))
            await asyncio.sleep(RETRY_INTERVAL if self.offset is None else INTERVAL)

    def metrics(self) -> Iterator[Sample]:
        """Yields the difference, once it is known."""
        if self.offset is not None:
            yield table.CLOCK_OFFSET.sample(self.offset)
