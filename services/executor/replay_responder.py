"""Answers to readers that missed steps."""

import asyncio

import structlog

from pagewire.services.executor.replay_buffer import ReplayBuffer
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError
from pagewire.shared.messages.plan import Replay

_WAITING = 64
_BURST = 64

_log = structlog.get_logger()


class ReplayResponder:
    """Sends those of the wanted steps that the buffer still has to the asker, one message each, closed by an empty one.

    An answer that starts behind the first wanted step says that the steps before it are lost. Answers go out one
    at a time, in bursts that the broker has taken in before the next, so that they never crowd out live steps.
    """

    def __init__(self, bus: Bus, buffer: ReplayBuffer) -> None:
        self._bus = bus
        self._buffer = buffer
        self._wanted: asyncio.Queue[tuple[Replay, str]] = asyncio.Queue(_WAITING)

    def ask(self, wanted: Replay, reply: str) -> None:
        """Takes in a request. One too many is dropped: its asker asks again."""
        try:
            self._wanted.put_nowait((wanted, reply))
        except asyncio.QueueFull:
            _log.warning("replay_dropped", waiting=_WAITING)

    @property
    def waiting(self) -> int:
        """Requests whose answer has not begun."""
        return self._wanted.qsize()

    async def run(self) -> None:
        """Answers until cancelled."""
        while True:
            wanted, reply = await self._wanted.get()
            try:
                await self._answer(wanted, reply)
            except BusError as error:
                _log.warning("replay_failed", reason=str(error))

    async def _answer(self, wanted: Replay, reply: str) -> None:
        steps = self._buffer.since(wanted.term, wanted.first, wanted.last)
        for start in range(0, len(steps), _BURST):
            for data in steps[start : start + _BURST]:
                self._bus.publish(reply, data)
            await self._bus.flush()
        self._bus.publish(reply, b"")
