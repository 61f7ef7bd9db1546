"""Estimates how likely a drafted token is accepted, from what happened to earlier ones."""

from collections.abc import Sequence

CLASSES = 6
"""Classes of match lengths: 1, 2 to 3, 4 to 7, and so on; the last one has all longer ones."""
PRIOR = (0.3, 0.45, 0.6, 0.7, 0.8, 0.85)
"""Rate of each class before anything is known."""
WEIGHT = 3.0
"""Tokens that the rate over all requests counts for in the rate of one."""
PRIOR_WEIGHT = 8.0
"""Tokens that `PRIOR` counts for in the rate over all requests."""
MEMORY = 24.0
"""Tokens after which the earlier ones of a request count half as much."""
SHARED_MEMORY = 256.0
"""Tokens after which the earlier ones of all requests count half as much."""
FADING = 0.995
"""Factor of the accepted and examined tokens of a class, of the slot and of all requests, when no token of its draft is
verified: its rate returns to the prior, so that it is tried again later."""


def class_of(match_length: int) -> int:
    """Returns the class of a match length.

    >>> [class_of(length) for length in (1, 2, 3, 4, 100)]
    [0, 1, 1, 2, 5]
    """
    return min(match_length.bit_length(), CLASSES) - 1


class _Rates:
    """Accepted and examined tokens of each class, of which older ones count less."""

    def __init__(self, memory: float) -> None:
        self._kept = 0.5 ** (1 / memory)
        self.accepted = [0.0] * CLASSES
        self.examined = [0.0] * CLASSES

    def add(self, match_class: int, accepted: float) -> None:
        self.accepted[match_class] = self.accepted[match_class] * self._kept + accepted
        self.examined[match_class] = self.examined[match_class] * self._kept + 1

    def fade(self, match_class: int) -> None:
        self.accepted[match_class] *= FADING
        self.examined[match_class] *= FADING

    def rate(self, match_class: int, prior: float, weight: float) -> float:
        return (self.accepted[match_class] + weight * prior) / (self.examined[match_class] + weight)


class Acceptance:
    """The rates at which drafted tokens are accepted: of each slot's sequence, and of all.

    The chance of a token depends on how many tokens before it agree with an earlier place: those of the match, and the
    drafted ones in front of it, which count as accepted.
    """

    def __init__(self, num_slots: int) -> None:
        self._shared = _Rates(SHARED_MEMORY)
        self._slots = [_Rates(MEMORY) for _ in range(num_slots)]

    def begin(self, slot: int) -> None:
        """Forgets what is known of a slot: another sequence has it now."""
        self._slots[slot] = _Rates(MEMORY)

    def survivals(self, slot: int, match_length: int, shares: Sequence[float]) -> list[float]:
        """Returns the chance of each drafted token that it and all before it are accepted; it never grows."""
        if not shares:
            return []
        survival, survivals, last_class, rate = 1.0, [], -1, 0.0
        for index, share in enumerate(shares):
            match_class = class_of(match_length + index)
            if match_class != last_class:
                last_class, rate = match_class, self._rate(slot, match_class)
            survival *= rate * share
            survivals.append(survival)
        return survivals

    def observe(self, slot: int, match_length: int, drafted: int, accepted: int) -> None:
        """Learns that `accepted` of the `drafted` tokens were right. Tokens behind a wrong one say nothing."""
        own, shared = self._slots[slot], self._shared
        for index in range(min(accepted + 1, drafted)):
            match_class = class_of(match_length + index)
            own.add(match_class, index < accepted)
            shared.add(match_class, index < accepted)

    def fade(self, slot: int, match_length: int) -> None:
        """Lets an estimate that nothing tests return to the prior."""
        self._slots[slot].fade(class_of(match_length))
        self._shared.fade(class_of(match_length))

    def _rate(self, slot: int, match_class: int) -> float:
        return self._slots[slot].rate(
            match_class, self._shared.rate(match_class, PRIOR[match_class], PRIOR_WEIGHT), WEIGHT
        )
