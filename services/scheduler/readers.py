"""How far the detokenizers have read: the lease never runs too far ahead of the slowest one."""

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
    """The detokenizers that read the steps of a term, known from their heartbeats."""

    def __init__(self, bus: Bus, on_heartbeat: Callable[[], None]) -> None:
        """`on_heartbeat` is called after each heartbeat, when the slowest reader may have moved on."""
        self._bus = bus
        self._notify = on_heartbeat
        self._beats: dict[str, tuple[float, Heartbeat]] = {}

    async def listen(self) -> None:
        """Subscribes to the heartbeats."""
        await self._bus.subscribe(f"{subjects.HEARTBEAT}.detokenizer.*", self._on_heartbeat)

    def slowest(self, term: int) -> int | None:
        """Returns the last step read by the slowest live reader of `term`; None while nobody reads it.

        A reader that has fallen silent does not count: when it is back, it is rebuilt from the scheduler's tokens.
        """
        now = time.monotonic()
        self._beats = {name: entry for name, entry in self._beats.items() if now - entry[0] < SILENCE}
        return min((beat.reads[term] for _, beat in self._beats.values() if term in beat.reads), default=None)

    def _on_heartbeat(self, message: Message) -> None:
        try:
            beat = _heartbeat.decode(message.data)
        except (WireVersionError, msgspec.DecodeError):
            return  # a peer of another version cannot read our steps
        self._beats[beat.instance] = (time.monotonic(), beat)
        self._notify()
