"""Writes the records of ended streams to the store, in bounded time and memory even if the store is full or gone."""

import asyncio
from collections import deque
from dataclasses import dataclass

import structlog

from pagewire.shared.bus import Bus
from pagewire.shared.bus.protocol import DONE_AGE
from pagewire.shared.errors import BusError, MessageTooLarge

WRITE_TIMEOUT = 0.8
"""Maximum seconds for which the store delays the last frame of a stream."""
RETRY_INTERVAL = 1.0
"""Seconds between two attempts to write the oldest record of the backlog."""
MAX_BACKLOG = 4096
"""Maximum number of records that wait for another attempt."""
MAX_BACKLOG_BYTES = 32 << 20
"""Maximum size of these records."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Record:
    """A record that the store has refused so far."""

    request_id: str
    data: bytes
    expires: float
    """Time of the event loop after which nobody needs the record."""


class RecordWriter:
    """Writes records, and tries again in the background if the store does not take them.

    Attributes:
        failed: records so far that the store did not take at once.
        lost: records so far that were given up, because the backlog was full or the record too old or too large.
    """

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup) -> None:
        self.failed = 0
        self.lost = 0
        self._bus = bus
        self._tasks = tasks
        self._backlog: deque[_Record] = deque()
        self._backlog_bytes = 0
        self._retrying: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Number of records in the backlog."""
        return len(self._backlog)

    async def write(self, request_id: str, data: bytes) -> None:
        """Writes a record; returns within `WRITE_TIMEOUT` seconds, except while there is no connection.

        Without a connection the last frame could not be sent either, so giving up early would gain nothing. If a
        backlog waits, the record joins it, and its stream is not delayed.
        """
        expires = asyncio.get_running_loop().time() + DONE_AGE
        if self._backlog:
            self.failed += 1
            self._add(_Record(request_id, data, expires))
            return
        while True:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT):
                    await self._bus.store.put_done(request_id, data)
            except MessageTooLarge as error:
                self.failed += 1
                self.lost += 1
                _log.error("record_too_large", request_id=request_id, reason=str(error))
            except (BusError, TimeoutError) as error:
                if not self._bus.connected:
                    await asyncio.sleep(RETRY_INTERVAL / 10)
                    continue
                self.failed += 1
                reason = str(error) or f"no answer within {WRITE_TIMEOUT:g} s"
                _log.warning("record_not_stored", request_id=request_id, reason=reason, retry_in=RETRY_INTERVAL)
                self._add(_Record(request_id, data, expires))
            return

    async def drain(self, timeout: float) -> None:
        """Waits until the backlog is empty, at most `timeout` seconds."""
        if self._retrying is not None:
            await asyncio.wait({self._retrying}, timeout=timeout)

    def _add(self, record: _Record) -> None:
        self._backlog.append(record)
        self._backlog_bytes += len(record.data)
        while len(self._backlog) > MAX_BACKLOG or self._backlog_bytes > MAX_BACKLOG_BYTES:
            self._remove_oldest()
            self.lost += 1
        if self._retrying is None or self._retrying.done():
            self._retrying = self._tasks.create_task(self._retry())

    def _remove_oldest(self) -> None:
        self._backlog_bytes -= len(self._backlog.popleft().data)

    async def _retry(self) -> None:
        """Writes the backlog, oldest record first; each record expires, so the task ends."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(RETRY_INTERVAL)
        while self._backlog:
            record = self._backlog[0]
            if record.expires < loop.time():
                self._remove_oldest()
                self.lost += 1
                _log.error("record_lost", request_id=record.request_id)
                continue
            try:
                async with asyncio.timeout(WRITE_TIMEOUT):
                    await self._bus.store.put_done(record.request_id, record.data)
            except MessageTooLarge as error:
                self.lost += 1
                _log.error("record_too_large", request_id=record.request_id, reason=str(error))
            except (BusError, TimeoutError):
                await asyncio.sleep(RETRY_INTERVAL)
                continue
            if self._backlog and self._backlog[0] is record:  # it may have been dropped meanwhile
                self._remove_oldest()
