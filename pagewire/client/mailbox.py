"""What has arrived and was not read yet, bounded however slowly the reader reads."""

from pagewire.shared.messages.client import Delta


class Mailbox:
    """Keeps deltas apart while the reader keeps up, and merges those of a choice once `capacity` are waiting."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._waiting: list[Delta] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delta: Delta) -> None:
        """Adds a delta. Deltas of one choice are put in order and without a gap."""
        if len(self._waiting) >= self._capacity:
            for newest in reversed(self._waiting):
                if newest.index == delta.index:
                    newest.text += delta.text
                    newest.token_ids += delta.token_ids
                    return
        self._waiting.append(delta)

    def take(self) -> list[Delta]:
        """Everything that waits, in the order of arrival."""
        taken, self._waiting = self._waiting, []
        return taken
