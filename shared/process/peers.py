"""The service instances that send heartbeats."""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

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


@dataclass(eq=False)
class _Listener(Subscription):
    """A part of the process that follows the heartbeats of a service, beside other `listeners`."""

    listeners: list["_Listener"]
    on_change: Callable[[], None] | None
    on_ended: Callable[[str, str], None] | None

    @override
    async def unsubscribe(self) -> None:
        self.listeners.remove(self)


class Peers:
    """The last heartbeat of each instance. A process has one, which decodes each heartbeat once for all listeners."""

    def __init__(self, bus: Bus, model: str = "") -> None:
        """`model`: token of the model whose instances count as alive; empty: those of all models do."""
        self._bus = bus
        self._model = model
        self._listeners: dict[str, list[_Listener]] = {}
        """The listeners of each service."""
        self._ended: set[str] = set()
        """Instances whose process has ended."""
        self._last: dict[str, tuple[Heartbeat, float]] = {}
        """By instance: the last heartbeat, and when it arrived or was repeated last."""
        self._heard_at = self._heard_since = time.monotonic()
        """When the last heartbeat arrived, and since when none can have been missed."""
        self._unreadable: dict[str, float] = {}
        """When the last heartbeat of another wire version arrived, by service."""

    async def listen(
        self,
        service: str = "*",
        on_change: Callable[[], None] | None = None,
        on_ended: Callable[[str, str], None] | None = None,
    ) -> Subscription:
        """Follows the heartbeats of one kind of service, or of all; the first listener of a kind asks for them.

        `on_ended` is called with the service and the instance of a process that has ended, `on_change` after that and
        after each heartbeat.
        Silence counts from the first call: begin with the service for which `gone` is called.
        """
        first = service not in self._listeners
        if not self._listeners:
            self._heard_at = self._heard_since = time.monotonic()
        listeners = self._listeners.setdefault(service, [])
        listener = _Listener(listeners, on_change, on_ended)
        listeners.append(listener)
        if first:
            await self._bus.subscribe(f"{subjects.HEARTBEAT}.{service}.*", partial(self._on_message, listeners))
            with suppress(BusUnavailable):  # then the next ones will do
                self._bus.publish(subjects.ANNOUNCE, b"")
        return listener

    def alive(self, service: str) -> list[Heartbeat]:
        """Returns the last heartbeats of the live instances of a service, ordered by instance id."""
        beats = [beat for beat in self._live(service) if not self._is_other(beat)]
        return sorted(beats, key=lambda beat: beat.instance)

    def others(self, service: str) -> list[Heartbeat]:
        """Returns the last heartbeats of the live instances of a service that serve another model."""
        return [beat for beat in self._live(service) if self._is_other(beat)]

    def _live(self, service: str) -> list[Heartbeat]:
        oldest = time.monotonic() - SILENCE
        return [beat for beat, at in self._last.values() if beat.service == service and at > oldest]

    def _is_other(self, beat: Heartbeat) -> bool:
        """Returns whether an instance serves another model only."""
        return bool(self._model and beat.model) and beat.model != self._model

    def has_other_version(self, service: str) -> bool:
        """Returns whether an instance of a service is alive whose heartbeats are of another wire version."""
        return time.monotonic() - self._unreadable.get(service, -SILENCE) < SILENCE

    def find(self, instance: str) -> Heartbeat | None:
        """Returns the last heartbeat of an instance, None if the instance is not alive."""
        beat, heard_at = self.last(instance)
        return beat if time.monotonic() - heard_at < SILENCE else None

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
        """Returns the last heartbeat of an instance, however old, and when it arrived or was repeated last, on the
        monotonic clock; without one, None and 0."""
        return self._last.get(instance, (None, 0.0))

    def retain(self, instances: Collection[str]) -> None:
        """Forgets all other instances."""
        self._last = {instance: last for instance, last in self._last.items() if instance in instances}

    def _on_message(self, listeners: list[_Listener], message: Message) -> None:
        now = time.monotonic()
        if now - self._heard_at > DEAF:
            self._heard_since = now
        self._heard_at = now
        _, service, instance = message.subject.rsplit(".", 2)
        ended = "" if message.data else instance
        if ended:
            self._ended.add(ended)
            self._last.pop(ended, None)
        else:
            beat = _heartbeat.try_decode(message.data)
            if beat is None:
                self._unreadable[service] = now
                return
            # The last heartbeat of a process and the message that it has ended come over different connections.
            if beat.instance in self._ended:
                return
            if beat.repeated and beat.instance in self._last:  # it may come later than a newer one
                beat = self._last[beat.instance][0]
            if beat.instance not in self._last:  # a new instance may replace silent ones
                self._last = {name: last for name, last in self._last.items() if now - last[1] < SILENCE}
            self._last[beat.instance] = (beat, now)
        for listener in list(listeners):
            if ended and listener.on_ended is not None:
                listener.on_ended(service, ended)
            if listener.on_change is not None:
                listener.on_change()
