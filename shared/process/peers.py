"""The service instances that send heartbeats."""

import time
from collections.abc import Callable, Collection
from contextlib import suppress

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.heartbeat import Heartbeat

SILENCE = 2.0
"""Seconds without a heartbeat after which an instance counts as gone: four intervals. An instance whose process has
ended is gone at once where a supervisor says so."""

DEAF = 1.5
"""Seconds without a heartbeat of anybody, this process included, after which this process has missed some."""

_heartbeat = Decoder(Heartbeat)


class Peers:
    """The last heartbeat of each instance."""

    def __init__(
        self,
        bus: Bus,
        on_change: Callable[[], None] | None = None,
        on_ended: Callable[[str], None] | None = None,
    ) -> None:
        """`on_ended` is called with an instance whose process has ended, `on_change` after that and each heartbeat."""
        self._bus = bus
        self._on_change = on_change
        self._on_ended = on_ended
        self._ended: set[str] = set()
        self._last: dict[str, tuple[Heartbeat, float]] = {}
        """By instance: the last heartbeat and the time of its arrival."""
        self._heard_at = self._heard_since = time.monotonic()
        """When the last heartbeat arrived, and since when none can have been missed."""

    async def listen(self, service: str = "*") -> Subscription:
        """Subscribes to the heartbeats of one kind of service, or of all, and asks for the first ones."""
        self._heard_at = self._heard_since = time.monotonic()
        subscription = await self._bus.subscribe(f"{subjects.HEARTBEAT}.{service}.*", self._on_message)
        with suppress(BusUnavailable):  # then the next ones will do
            self._bus.publish(subjects.ANNOUNCE, b"")
        return subscription

    def alive(self, service: str) -> list[Heartbeat]:
        """Returns the last heartbeats of the live instances of a service, ordered by instance id."""
        oldest = time.monotonic() - SILENCE
        self._last = {instance: last for instance, last in self._last.items() if last[1] > oldest}
        found = [beat for beat, _ in self._last.values() if beat.service == service]
        return sorted(found, key=lambda beat: beat.instance)

    def find(self, instance: str) -> Heartbeat | None:
        """Returns the last heartbeat of an instance, None if the instance is not alive."""
        beat, age = self.last(instance)
        return beat if age < SILENCE else None

    def gone(self, instance: str) -> bool:
        """Returns whether an instance is certainly gone: its process has ended, or it has been silent.

        Silence counts only while heartbeats arrive here: after a break of this process, or of its connection, it counts
        anew. An instance that was never heard is gone after `SILENCE` seconds of listening.
        """
        if instance in self._ended:
            return True
        now = time.monotonic()
        last = self._last.get(instance)
        silent_since = max(self._heard_since, last[1] if last is not None else 0.0)
        return now - self._heard_at < DEAF and now - silent_since > SILENCE

    def last(self, instance: str) -> tuple[Heartbeat | None, float]:
        """Returns the last heartbeat of an instance, however old, and its age in seconds; without one, None and 0."""
        if instance not in self._last:
            return None, 0.0
        beat, arrived = self._last[instance]
        return beat, time.monotonic() - arrived

    def retain(self, instances: Collection[str]) -> None:
        """Forgets all other instances."""
        self._last = {instance: last for instance, last in self._last.items() if instance in instances}

    def _on_message(self, message: Message) -> None:
        now = time.monotonic()
        if now - self._heard_at > DEAF:
            self._heard_since = now
        self._heard_at = now
        if not message.data:
            self._forget(message.subject.rpartition(".")[2])
        else:
            beat = _heartbeat.try_decode(message.data)
            # The last heartbeat of a process and the message that it has ended come over different connections.
            if beat is None or beat.instance in self._ended:
                return
            self._last[beat.instance] = (beat, now)
        if self._on_change is not None:
            self._on_change()

    def _forget(self, instance: str) -> None:
        self._ended.add(instance)
        self._last.pop(instance, None)
        if self._on_ended is not None:
            self._on_ended(instance)
