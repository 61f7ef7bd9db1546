"""Tells schedulers of sequences that end before the device's own stop."""

import asyncio

import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError, NoResponders
from pagewire.shared.messages import encode, pack
from pagewire.shared.messages.attach import Attach
from pagewire.shared.messages.finish import FinishReason, FinishSequences

TIMEOUT = 1.0
"""Seconds that a scheduler has to answer."""
ATTEMPTS = 5

_log = structlog.get_logger()


class Finisher:
    """Asks until it is answered or the scheduler is gone: its successor hears what has ended when it attaches."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._tasks = tasks

    def finish(self, attach: Attach, sequences: list[int], reason: FinishReason) -> None:
        """Has the scheduler of an attachment drop these sequences."""
        self._tasks.create_task(self._ask(attach, sequences, reason))

    async def _ask(self, attach: Attach, sequences: list[int], reason: FinishReason) -> None:
        request = encode(FinishSequences(attach.term, pack(sequences), reason))
        for _ in range(ATTEMPTS):
            try:
                await self._bus.request(f"{subjects.FINISH}.{attach.scheduler}.finish", request, timeout=TIMEOUT)
            except NoResponders:
                return
            except BusError as error:
                _log.warning("finish_not_heard", request_id=attach.request_id, reason=str(error))
                await asyncio.sleep(TIMEOUT)
            else:
                return
