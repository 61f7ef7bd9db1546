"""Who may be answered."""

from pagewire.shared import subjects


class Inboxes:
    """Tells client inboxes from subjects of our own, which a client could name to have us publish there.

    Attributes:
        dropped: messages refused so far.
    """

    def __init__(self) -> None:
        self.dropped = 0

    def accept(self, reply: str) -> bool:
        """Whether `reply` is a client inbox; counts when it is not."""
        if subjects.is_client_inbox(reply):
            return True
        self.dropped += 1
        return False
