"""Checks once a second whether the store takes new work."""

import asyncio
from collections.abc import Callable

import structlog

from pagewire.shared.bus import Store
from pagewire.shared.errors import BusError, RequestTimeout, StorageRefused

INTERVAL = 1.0
"""Seconds between two checks."""

_log = structlog.get_logger()


class StoreMonitor:
    """Keeps the result of the last check, so that a request need not wait for a store that does not answer.

    JetStream refuses work beyond its limits at once, but when its disk is full, it does not answer at all.

    Attributes:
        refusal: why the store takes no work; empty: it takes work.
    """

    def __init__(self, store: Store, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the store begins or ceases to refuse."""
        self.refusal = ""
        self._store = store
        self._on_change = on_change

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            try:
                await self._store.check()
            except StorageRefused as error:
                self._set(error.reason)
            except RequestTimeout:
                self._set("no answer")
            except BusError:
                pass  # without a connection, nothing is known
            else:
                self._set("")
            await asyncio.sleep(INTERVAL)

    def _set(self, refusal: str) -> None:
        changed = bool(refusal) != bool(self.refusal)
        self.refusal = refusal
        if changed:
            if refusal:
                _log.error("store_refuses", reason=refusal)
            else:
                _log.info("store_accepts")
            self._on_change()
