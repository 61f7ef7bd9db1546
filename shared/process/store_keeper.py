"""Has the store restored when somebody has deleted or changed what it keeps on the broker."""

import asyncio

import structlog

from pagewire.shared.bus import Store
from pagewire.shared.errors import BusError, StorageRefused

INTERVAL = 2.5
"""Seconds between two checks of the store."""

_log = structlog.get_logger()


class StoreKeeper:
    """Checks the store at intervals, and restores what it keeps on the broker.

    Attributes:
        problem: why the store cannot be restored; empty: it is as it must be, as far as is known.
    """

    def __init__(self, store: Store) -> None:
        self.problem = ""
        self._store = store

    async def run(self) -> None:
        """Checks the store until cancelled."""
        before = ""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                repairs = await self._store.mend()
            except StorageRefused as error:
                if error.reason == before != self.problem:  # a broker that has just started may refuse once
                    _log.error("store_not_mended", reason=error.reason, retry_in=INTERVAL)
                    self.problem = error.reason
                before = error.reason
            except BusError:
                pass  # without an answer of the broker, nothing is known
            else:
                self.problem = before = ""
                for repair in repairs:
                    _log.error("store_mended", reason=repair)
