"""Puts the deltas of a stream in order, each token exactly once."""

from pagewire.shared.messages.client import Delta


class Sequencer:
    """Tells whether a delta is the next of its choice. After a recovery the same frames may arrive again.

    >>> sequencer = Sequencer(choices=1)
    >>> first, third = Delta(0, 0, "Once", [7]), Delta(0, 2, " a", [9])
    >>> sequencer.is_next(first), sequencer.is_next(first), sequencer.is_early(third), sequencer.resume_from
    (True, False, True, 1)
    """

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._next: dict[int, int] = {}

    def is_next(self, delta: Delta) -> bool:
        """Returns whether `delta` is next, and advances if so. An early delta is sent again after a recovery."""
        expected = self._next.get(delta.index, 0)
        if delta.start != expected:
            return False
        self._next[delta.index] = expected + len(delta.token_ids)
        return True

    def is_early(self, delta: Delta) -> bool:
        """Returns whether tokens before this delta are missing."""
        return delta.start > self._next.get(delta.index, 0)

    @property
    def received(self) -> int:
        """Number of tokens received, of all choices."""
        return sum(self._next.values())

    @property
    def resume_from(self) -> int:
        """First position that any choice is missing."""
        return min(self._next.get(index, 0) for index in range(self._choices))
