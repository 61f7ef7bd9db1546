"""Whether a request would be served now."""

from collections.abc import Callable

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.peers import Peers

NEEDED = ("tokenizer", "detokenizer", "scheduler")
"""A request passes each of them. A scheduler is ready only with an executor."""


class Health:
    """Hears the services and tells when the answer changes."""

    def __init__(self, bus: Bus, changed: Callable[[], None]) -> None:
        self._bus = bus
        self._peers = Peers(bus)
        self._changed = changed
        self._was = False

    async def listen(self) -> None:
        """Starts to hear."""
        await self._peers.listen()
        await self._bus.subscribe(f"{subjects.HEARTBEAT}.*.*", self._on_beat)

    def missing(self) -> str:
        """Why a request would not be served; empty when it would."""
        if not self._bus.connected:
            return "there is no connection to the broker"
        for service in NEEDED:
            alive = self._peers.alive(service)
            if not alive:
                return f"no {service} is there"
            if not any(beat.ready for beat in alive):
                return f"no {service} is ready"
        return ""

    def _on_beat(self, _: Message) -> None:
        healthy = not self.missing()
        if healthy != self._was:
            self._was = healthy
            self._changed()
