"""Whose executor this is."""

import time
from collections.abc import Callable

from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Claim
from pagewire.shared.peers import SILENCE


class Ownership:
    """Decides claims. An executor belongs to one scheduler at a time, and never to an older term than before.

    Args:
        model: served name that a claim must ask for.
        find: last heartbeat of a live instance, None for a silent one.
    """

    def __init__(self, model: str, find: Callable[[str], Heartbeat | None]) -> None:
        self._model = model
        self._find = find
        self._scheduler = ""
        self._renewed_at = 0.0
        self.term = 0

    def decide(self, claim: Claim) -> bool:
        """Whether the claim is accepted; the executor is the claimant's then.

        The owner's own claim of the term in force is accepted again: its answer was lost.
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
        """Whether another scheduler may have it: the owner is silent, or has gone on with a higher term elsewhere."""
        if not self._scheduler:
            return True
        beat = self._find(self._scheduler)
        if beat is not None:
            return beat.term > self.term
        return time.monotonic() - self._renewed_at >= SILENCE

    def renew(self) -> None:
        """Notes a sign of life of the owner other than its heartbeat."""
        self._renewed_at = time.monotonic()

    def forget(self, scheduler: str) -> bool:
        """Makes the executor free if the scheduler, whose process has ended, owned it; returns whether it did."""
        if scheduler != self._scheduler:
            return False
        self.release()
        return True

    def release(self) -> None:
        """The owner has lost it; only a higher term begins anew."""
        self._scheduler = ""
