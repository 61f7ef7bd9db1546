"""How far the readers of the steps have come: their pace is part of the credit that the executor gets."""

import time
from collections.abc import Callable

import msgspec

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import WireVersionError
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.peers import SILENCE

_heartbeat = Decoder(Heartbeat)


class Readers:
    """The detokenizers that read the steps of a term, as their heartbeats tell."""

    def __init__(self, bus: Bus, heard: Callable[[], None]) -> None:
        """`heard` is called after each heartbeat: the slowest may have moved on."""
        self._bus = bus
        self._heard = heard
        self._beats: dict[str, tuple[float, Heartbeat]] = {}

    async def listen(self) -> None:
        """Starts to hear heartbeats."""
        await self._bus.subscribe(f"{subjects.HEARTBEAT}.detokenizer.*", self._hear)

    def slowest(self, term: int) -> int | None:
        """Last step read by the slowest live reader of `term`; None while nobody reads it.

        A reader that has fallen silent counts no more: it is rebuilt from the scheduler's tokens when it is back.
        """
        now = time.monotonic()
        self._beats = {name: heard for name, heard in self._beats.items() if now - heard[0] < SILENCE}
        return min((beat.reads[term] for _, beat in self._beats.values() if term in beat.reads), default=None)

    def _hear(self, message: Message) -> None:
        try:
            beat = _heartbeat.decode(message.data)
        except (WireVersionError, msgspec.DecodeError):
            return  # a peer that cannot be understood reads nothing of ours
        self._beats[beat.instance] = (time.monotonic(), beat)
        self._heard()
