"""A bounded queue of deltas."""

import msgspec

from pagewire.shared.messages.client import Delta


class DeltaQueue:
    """Holds the unread deltas of a stream. Once `capacity` are waiting, later deltas are merged by choice."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._waiting: list[Delta] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delta: Delta) -> None:
        """Adds a delta. The deltas of one choice must come in order and without a gap."""
        if len(self._waiting) >= self._capacity:
            for newest in reversed(self._waiting):
                if newest.index == delta.index:
                    newest.text += delta.text
                    newest.token_ids += delta.token_ids
                    if newest.logprobs is not None and delta.logprobs is not None:
                        newest.logprobs += delta.logprobs
                    if newest.origin != delta.origin:
                        newest.origin = msgspec.UNSET
                    return
        self._waiting.append(delta)

    def take(self) -> list[Delta]:
        """Removes and returns all deltas in the order of arrival."""
        deltas, self._waiting = self._waiting, []
        return deltas
