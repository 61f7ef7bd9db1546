"""Slots and blocks on their way back: a plan takes them from live sequences, and no step has answered it yet."""

from collections import deque
from collections.abc import Iterator

from pagewire.services.scheduler.sequence import Sequence, State


class Departures:
    """What the next plan removes, and what plans removed that are still to be answered.

    The executor may write to the blocks of a live sequence until it has applied the plan that removes it.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        """Those that the next plan removes."""
        self._next: list[Sequence] = []
        self._sent: deque[tuple[int, Sequence]] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._next
        for _, sequence in self._sent:
            yield sequence

    @property
    def makes_room(self) -> bool:
        """Whether room is being made for those that run already."""
        return bool(self._next) or any(sequence.state is State.PREEMPTED for _, sequence in self._sent)

    def add(self, sequence: Sequence) -> None:
        """A live sequence: its slot and blocks come back later."""
        self.slots.append(sequence.slot)
        self._next.append(sequence)

    def send(self, plan: int) -> None:
        """Plan `plan` removes what was to be removed."""
        self._sent.extend((plan, sequence) for sequence in self._next)
        self.slots, self._next = [], []

    def answered(self, plan: int) -> Iterator[Sequence]:
        """Those that plans up to `plan` removed: the executor touches nothing of them any more."""
        while self._sent and self._sent[0][0] <= plan:
            yield self._sent.popleft()[1]
