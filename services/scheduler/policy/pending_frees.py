"""Slots and blocks that a plan takes from live sequences, until a step output has answered that plan."""

from collections import deque
from collections.abc import Iterator

from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState


class PendingFrees:
    """Preempted and aborted sequences whose slots and blocks the executor may still use.

    The executor may write to the blocks of a live sequence until it has applied the plan that removes the sequence.
    Iteration yields all of these sequences.
    """

    def __init__(self) -> None:
        self.removed_slots: list[int] = []
        """Slots that the next plan removes."""
        self._next: list[Sequence] = []
        self._sent: deque[tuple[int, Sequence]] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._next
        for _, sequence in self._sent:
            yield sequence

    @property
    def blocks_admission(self) -> bool:
        """Whether nothing may be admitted, because room is being made for running sequences."""
        return bool(self._next) or any(sequence.state is SequenceState.PREEMPTED for _, sequence in self._sent)

    def add(self, sequence: Sequence) -> None:
        """Adds a live sequence that the next plan removes."""
        self.removed_slots.append(sequence.slot)
        self._next.append(sequence)

    def mark_sent(self, plan: int) -> None:
        """Records that plan number `plan` removes all that was added since the plan before."""
        self._sent.extend((plan, sequence) for sequence in self._next)
        self.removed_slots, self._next = [], []

    def pop_answered(self, plan: int) -> Iterator[Sequence]:
        """Removes and yields the sequences of all plans up to `plan`, which a step output has answered."""
        while self._sent and self._sent[0][0] <= plan:
            yield self._sent.popleft()[1]
