"""The replay ring: the last step outputs of the term, as they were sent."""

from collections import deque
from itertools import islice

from pagewire.shared.messages.step import RING_STEPS

RING_BYTES = 128 * 1024 * 1024
"""Bytes that the ring holds, should steps be large."""


class Ring:
    """Encoded step outputs of one term, in dense step order. The oldest go when the ring is full."""

    def __init__(self, steps: int = RING_STEPS, size: int = RING_BYTES) -> None:
        self._steps, self._size = steps, size
        self._held: deque[bytes] = deque()
        self._bytes = 0
        self._term = 0
        self._next = 0

    def append(self, term: int, step: int, data: bytes) -> None:
        """Keeps the output of a step, the one after the last. The first of another term empties the ring."""
        if term != self._term or step != self._next:
            self._held.clear()
            self._bytes = 0
        self._term, self._next = term, step + 1
        self._held.append(data)
        self._bytes += len(data)
        while len(self._held) > self._steps or self._bytes > self._size:
            self._bytes -= len(self._held.popleft())

    def since(self, term: int, first: int, last: int) -> list[bytes]:
        """What is still held of the steps in [first, last], in order. Empty for another term."""
        if term != self._term:
            return []
        oldest = self._next - len(self._held)
        return list(islice(self._held, max(first - oldest, 0), max(last - oldest + 1, 0)))
