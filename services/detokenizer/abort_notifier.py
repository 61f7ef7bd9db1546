"""Tells schedulers about sequences: that their results are not needed any more, or that tokens are missing here."""

import asyncio
from contextlib import suppress

import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError, NoResponders
from pagewire.shared.messages import Decoder, encode, pack
from pagewire.shared.messages.abort import AbortedSequences, AbortReason, AbortSequences
from pagewire.shared.messages.attach import Attach

ABORT_TIMEOUT = 1.0
"""Seconds that a scheduler has to answer an abort, and between two attempts."""
ABORT_ATTEMPTS = 5
"""Attempts to reach the scheduler."""
ABSENCE = 1.0
"""Seconds for which a scheduler without a subscription is tried again: it may be moving to another server."""
_log = structlog.get_logger()
_aborted = Decoder(AbortedSequences)


class AbortNotifier:
    """Repeats each message until the scheduler answers. The successor of a lost scheduler learns from the answer to its
    `Attach` what has ended."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._tasks = tasks

    def abort(self, attach: Attach, sequences: list[int], reason: AbortReason) -> None:
        """Has the scheduler of an attachment abort these sequences."""
        self._tasks.create_task(self._abort(attach, sequences, reason))

    def ask_again(self, attach: Attach, count: int) -> None:
        """Asks the scheduler to attach a request again with all of its tokens, as some of its `count` sequences' tokens
        were missed here. If the scheduler does not have the request any more, its work returns to the queue."""
        self._tasks.create_task(self._ask_again(attach, count))

    async def _ask_again(self, attach: Attach, count: int) -> None:
        sequences = list(range(attach.first_sequence, attach.first_sequence + count))
        if not await self._abort(attach, sequences, AbortReason.LOST_TOKENS):
            with suppress(BusError):  # the queue delivers the work again when nobody renews it
                await self._bus.store.return_work(attach.ack)

    async def _abort(self, attach: Attach, sequences: list[int], reason: AbortReason) -> int:
        """Returns the number of sequences that the scheduler had; 0 if it is gone or does not answer."""
        request = encode(AbortSequences(attach.term, pack(sequences), reason))
        for _ in range(ABORT_ATTEMPTS):
            try:
                subject = f"{subjects.ABORT}.{attach.scheduler}.abort"
                answer = await self._bus.request(subject, request, timeout=ABORT_TIMEOUT)
                aborted = _aborted.try_decode(answer.data)
            except NoResponders:  # the scheduler is gone, or moves to another server of a cluster
                await asyncio.sleep(ABSENCE / ABORT_ATTEMPTS)
            except BusError as error:
                _log.warning("abort_not_answered", request_id=attach.request_id, reason=str(error))
                await asyncio.sleep(ABORT_TIMEOUT)
            else:
                return aborted.known if aborted is not None else 0
        return 0
