"""Notices readers that are gone: a killed client is to cost the device no more steps."""

import itertools
from collections.abc import Iterable

from pagewire.services.detokenizer.mailbox import Mailbox
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.bus.framing import NO_RESPONDERS, STATUS

PATIENCE = 13
"""Frames in a row, one per look, that reached nobody before a reader counts as gone. With a look every 0.8 s that is
10 s, as a client that reconnects seems to be gone meanwhile."""


class Presence:
    """Gives a reader's next frame a reply subject at every look: the broker answers there when nobody listens.

    A reader without a stream cannot be asked, as the one message that it waits for is its result.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = bus.new_inbox()
        self._numbers = itertools.count()
        self._asked: dict[str, Mailbox] = {}

    async def listen(self) -> Subscription:
        """Hears what the broker answers."""
        return await self._bus.subscribe(f"{self._inbox}.*", self._on_answer)

    def look(self, mailboxes: Iterable[Mailbox]) -> list[Mailbox]:
        """Those that are gone. The others are asked again, with the next frame that they get."""
        before, self._asked = self._asked, {}
        gone = []
        for mailbox in mailboxes:
            if not mailbox.streaming:
                continue
            if mailbox.probe in before:
                self._asked[mailbox.probe] = mailbox  # it was due no frame since the last look
                continue
            if mailbox.refused < mailbox.asked:
                mailbox.asked = mailbox.refused = 0  # it listened to the last one
            elif mailbox.refused >= PATIENCE:
                gone.append(mailbox)
                continue
            mailbox.asked += 1
            mailbox.probe = f"{self._inbox}.{next(self._numbers)}"
            self._asked[mailbox.probe] = mailbox
        return gone

    def _on_answer(self, message: Message) -> None:
        mailbox = self._asked.get(message.subject)
        if mailbox is not None and message.headers.get(STATUS) == NO_RESPONDERS:
            mailbox.refused += 1
