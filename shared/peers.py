"""Who is there: the heartbeats that were heard lately."""

import time
from collections.abc import Callable

import msgspec

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import WireVersionError
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.heartbeat import Heartbeat

SILENCE = 2.0
"""Seconds without a heartbeat after which an instance counts as gone: four beats."""

_heartbeat = Decoder(Heartbeat)


class Peers:
    """The last heartbeat of each live instance."""

    def __init__(self, bus: Bus, heard: Callable[[], None] | None = None) -> None:
        """`heard` is called after each heartbeat."""
        self._bus = bus
        self._on_beat = heard
        self._heard: dict[str, tuple[float, Heartbeat]] = {}

    async def listen(self, service: str = "*") -> None:
        """Starts to hear one kind of service, or all."""
        await self._bus.subscribe(f"{subjects.HEARTBEAT}.{service}.*", self._hear)

    def alive(self, service: str) -> list[Heartbeat]:
        """Instances of a service heard within `SILENCE`, by instance id."""
        now = time.monotonic()
        self._heard = {name: heard for name, heard in self._heard.items() if now - heard[0] < SILENCE}
        found = [beat for _, beat in self._heard.values() if beat.service == service]
        return sorted(found, key=lambda beat: beat.instance)

    def find(self, instance: str) -> Heartbeat | None:
        """The last heartbeat of one instance, if it is alive."""
        heard = self._heard.get(instance)
        return heard[1] if heard is not None and time.monotonic() - heard[0] < SILENCE else None

    def _hear(self, message: Message) -> None:
        try:
            beat = _heartbeat.decode(message.data)
        except (WireVersionError, msgspec.DecodeError):
            return  # a peer that cannot be understood is not there
        self._heard[beat.instance] = (time.monotonic(), beat)
        if self._on_beat is not None:
            self._on_beat()
