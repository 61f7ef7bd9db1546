"""Which scheduler owns the executor."""

import time
from collections.abc import Callable

from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Claim
from pagewire.shared.process.peers import SILENCE


class Ownership:
    """Decides about claims. One scheduler owns the executor at a time, and the term never decreases.

    Args:
        model: served name that a claim must name.
        find: returns the last heartbeat of a live instance, or None if the instance is silent.
        gone: returns whether a silent instance is certainly gone: after a pause of this process it may only be unread.
    """

    def __init__(self, model: str, find: Callable[[str], Heartbeat | None], gone: Callable[[str], bool]) -> None:
        self._model = model
        self._find = find
        self._gone = gone
        self._scheduler = ""
        self._renewed_at = 0.0
        self._confirmed = False
        """Whether a heartbeat of the owner has had the current term."""
        self.term = 0

    def decide(self, claim: Claim) -> bool:
        """Returns whether the claim is accepted; if so, the claiming scheduler becomes the owner.

        A repeated claim of the owner for the current term is accepted again: the first answer may have been lost.
        """
        own = claim.scheduler == self._scheduler
        if claim.model != self._model or claim.term < self.term or (claim.term == self.term and not own):
            return False
        if not own and not self.free:
            return False
        self._confirmed &= claim.term == self.term
        self._scheduler, self.term = claim.scheduler, claim.term
        self.renew()
        return True

    @property
    def free(self) -> bool:
        """Whether another scheduler may claim the executor.

        The owner is silent, has a higher term elsewhere, or drains and has given the executor up.
        """
        beat = self._find(self._scheduler)
        return self.released and (beat is None or beat.term > self.term or beat.draining)

    @property
    def released(self) -> bool:
        """Whether the owner has given the executor up, or is silent. The owner itself may claim the executor again."""
        if not self._scheduler:
            return True
        beat = self._find(self._scheduler)
        if beat is None:
            return time.monotonic() - self._renewed_at >= SILENCE and self._gone(self._scheduler)
        return beat.term > self.term or (self._confirmed and beat.term != self.term)

    def observe(self) -> None:
        """Reads the owner's heartbeat; called for each one."""
        beat = self._find(self._scheduler)
        self._confirmed |= beat is not None and beat.term == self.term

    def renew(self) -> None:
        """Records that the owner is alive, by a message other than its heartbeat."""
        self._renewed_at = time.monotonic()

    def forget(self, scheduler: str) -> bool:
        """Makes the executor free if the scheduler, whose process has ended, owned it; returns whether it did."""
        if scheduler != self._scheduler:
            return False
        self.release()
        return True

    def release(self) -> None:
        """Removes the owner. The next claim needs a higher term."""
        self._scheduler = ""
