"""Notices clients that have disconnected, so that the device computes nothing more for them."""

import itertools
from collections.abc import Iterable

from pagewire.services.detokenizer.state.stream import Subscriber
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.bus.framing import NO_RESPONDERS, STATUS

MAX_UNDELIVERED = 13
"""Probes in a row without a listener after which a subscriber counts as disconnected: 10 s with a probe every 0.8 s,
because a client that reconnects has no listener meanwhile."""


class DisconnectMonitor:
    """Probes subscribers: their next frame gets a reply subject, at which the broker answers if the inbox has no
    listener. A subscriber that waits for a result is not probed, as the result is its only frame."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = bus.new_inbox()
        self._numbers = itertools.count()
        self._probed: dict[str, Subscriber] = {}

    async def listen(self) -> Subscription:
        """Subscribes to the answers of the broker."""
        return await self._bus.subscribe(f"{self._inbox}.*", self._on_answer)

    def check(self, subscribers: Iterable[Subscriber]) -> list[Subscriber]:
        """Returns the subscribers that have disconnected, and probes the others with their next frame."""
        before, self._probed = self._probed, {}
        disconnected = []
        for subscriber in subscribers:
            if not subscriber.streaming:
                continue
            if subscriber.probe in before:
                self._probed[subscriber.probe] = subscriber  # no frame has been due since the last check
                continue
            if subscriber.undelivered < subscriber.probes:
                subscriber.probes = subscriber.undelivered = 0  # the last frame had a listener
            elif subscriber.undelivered >= MAX_UNDELIVERED:
                disconnected.append(subscriber)
                continue
            subscriber.probes += 1
            subscriber.probe = f"{self._inbox}.{next(self._numbers)}"
            self._probed[subscriber.probe] = subscriber
        return disconnected

    def _on_answer(self, message: Message) -> None:
        subscriber = self._probed.get(message.subject)
        if subscriber is not None and message.headers.get(STATUS) == NO_RESPONDERS:
            subscriber.undelivered += 1
