"""Puts the frames of a stream in order: each token once, none missing."""

from pagewire.shared.messages.client import Delta


class Sequencer:
    """Tells for each delta whether it is the next of its choice. After a recovery frames come again, unchanged."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._next: dict[int, int] = {}

    def is_next(self, delta: Delta) -> bool:
        """True once for every token, in order. What comes early is refused too: it comes again with the resumption."""
        expected = self._next.get(delta.index, 0)
        if delta.start != expected:
            return False
        self._next[delta.index] = expected + len(delta.token_ids)
        return True

    def is_early(self, delta: Delta) -> bool:
        """Whether tokens before this delta are missing."""
        return delta.start > self._next.get(delta.index, 0)

    @property
    def received(self) -> int:
        """Tokens of all choices so far."""
        return sum(self._next.values())

    @property
    def resume_from(self) -> int:
        """The position from which on every choice has what is missing."""
        return min(self._next.get(index, 0) for index in range(self._choices))
