"""Which waiting sequences may get a slot by their adapters. Pure."""

from collections.abc import Iterable

from pagewire.services.scheduler.policy.sequence import Sequence

MAX_PASSED = 64
"""Steps for which sequences of running adapters may get slots before one whose adapter finds no place."""


class AdapterAdmission:
    """The adapters that run, for one plan.

    Once a sequence has been passed for `MAX_PASSED` steps, no other sequence with an adapter gets a slot before it.

    >>> from pagewire.shared.messages.work import Sampling
    >>> a, b, c = (Sequence(i, [0], 1, Sampling(1), adapter=name) for i, name in enumerate("aba"))
    >>> admission = AdapterAdmission([a], 1)
    >>> admission.admits(b, 0), admission.admits(c, 0)
    (False, True)
    >>> admission.admits(b, MAX_PASSED), admission.admits(c, MAX_PASSED)
    (False, False)
    """

    def __init__(self, running: Iterable[Sequence], most: int) -> None:
        """`most` adapters may run in one step."""
        self._running = {sequence.adapter for sequence in running if sequence.adapter}
        self._most = most
        self._closed = False

    def admits(self, sequence: Sequence, num_steps: int) -> bool:
        """Returns whether a waiting sequence with an adapter may get a slot, after `num_steps` steps of the term.

        Sequences are asked about in the order in which they should get slots.
        """
        if self._closed:
            return False
        if sequence.adapter in self._running or len(self._running) < self._most:
            return True
        if sequence.passed_since < 0:
            sequence.passed_since = num_steps
        self._closed = num_steps - sequence.passed_since >= MAX_PASSED
        return False

    def add(self, sequence: Sequence) -> None:
        """Counts the adapter of a sequence that has got a slot."""
        if sequence.adapter:
            self._running.add(sequence.adapter)
