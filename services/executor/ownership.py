"""Which scheduler owns the executor."""

import time
from collections.abc import Callable

from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Claim
from pagewire.shared.peers import SILENCE


class Ownership:
    """Decides about claims. One scheduler owns the executor at a time, and the term never decreases.

    Args:
        model: served name that a claim must name.
        find: returns the last heartbeat of a live instance, or None if the instance is silent.
    """

    def __init__(self, model: str, find: Callable[[str], Heartbeat | None]) -> None:
        self._model = model
        self._find = find
        self._scheduler = ""
        self._renewed_at = 0.0
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
        self._scheduler, self.term = claim.scheduler, claim.term
        self.renew()
        return True

    @property
    def free(self) -> bool:
        """Whether another scheduler may claim the executor: the owner is silent, or has a higher term elsewhere."""
        if not self._scheduler:
            return True
        beat = self._find(self._scheduler)
        if beat is not None:
            return beat.term > self.term
        return time.monotonic() - self._renewed_at >= SILENCE

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
