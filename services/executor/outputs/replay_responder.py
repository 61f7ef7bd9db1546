"""Sends step outputs again to readers that missed them."""

import asyncio

import structlog

from pagewire.services.executor.outputs.replay_buffer import ReplayBuffer
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError
from pagewire.shared.messages.plan import Replay

_WAITING = 64
"""Maximum number of queued requests."""
_BURST = 64
"""Number of outputs between two flushes."""

_log = structlog.get_logger()


class ReplayResponder:
    """Answers replay requests with the outputs that the buffer still has, one message each, then an empty message.

    If the first output is later than the first requested step, the steps between them are lost. Requests are answered
    one at a time, in bursts that are flushed one by one, so that replays do not delay the outputs of new steps.
    """

    def __init__(self, bus: Bus, buffer: ReplayBuffer) -> None:
        self._bus = bus
        self._buffer = buffer
        self._requests: asyncio.Queue[tuple[Replay, str]] = asyncio.Queue(_WAITING)

    def ask(self, request: Replay, reply: str) -> None:
        """Queues a request, or drops it if the queue is full: the reader asks again."""
        try:
            self._requests.put_nowait((request, reply))
        except asyncio.QueueFull:
            _log.warning("replay_dropped", waiting=_WAITING)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return self._requests.qsize()

    async def run(self) -> None:
        """Answers requests until cancelled."""
        while True:
            request, reply = await self._requests.get()
            try:
                await self._answer(request, reply)
            except BusError as error:
                _log.warning("replay_failed", reason=str(error))

    async def _answer(self, request: Replay, reply: str) -> None:
        steps = self._buffer.since(request.term, request.first, request.last)
        for start in range(0, len(steps), _BURST):
            for data in steps[start : start + _BURST]:
                self._bus.publish(reply, data)
            await self._bus.flush()
        self._bus.publish(reply, b"")
