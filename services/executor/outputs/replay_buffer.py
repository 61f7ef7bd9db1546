"""The last step outputs of the term, as they were published, for readers that missed some."""

from collections import deque
from itertools import islice

from pagewire.shared.messages.step import RING_STEPS

REPLAY_BYTES = 128 * 1024 * 1024
"""Maximum size of the buffer, in bytes."""


class ReplayBuffer:
    """Encoded step outputs of one term, in step order without gaps. The oldest are dropped when the buffer is full.

    >>> buffer = ReplayBuffer(steps=2)
    >>> for step in range(3):
    ...     buffer.append(1, step, b"step %d" % step)
    >>> buffer.since(1, first=0, last=2)
    [b'step 1', b'step 2']
    """

    def __init__(self, steps: int = RING_STEPS, size: int = REPLAY_BYTES) -> None:
        self._steps, self._size = steps, size
        self._outputs: deque[bytes] = deque()
        self._bytes = 0
        self._term = 0
        self._next = 0

    def append(self, term: int, step: int, data: bytes) -> None:
        """Adds the output of the next step. An output of another term or out of order empties the buffer first."""
        if term != self._term or step != self._next:
            self._outputs.clear()
            self._bytes = 0
        self._term, self._next = term, step + 1
        self._outputs.append(data)
        self._bytes += len(data)
        while len(self._outputs) > self._steps or self._bytes > self._size:
            self._bytes -= len(self._outputs.popleft())

    def since(self, term: int, first: int, last: int) -> list[bytes]:
        """Returns the outputs of steps [first, last] that are in the buffer, in order; none for another term."""
        if term != self._term:
            return []
        oldest = self._next - len(self._outputs)
        return list(islice(self._outputs, max(first - oldest, 0), max(last - oldest + 1, 0)))
