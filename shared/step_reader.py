"""Puts the steps of one executor in order."""

from pagewire.shared.messages.step import StepOutput

KEPT = 1024
"""Steps behind a gap that are kept aside. What comes after them is dropped, and is missing later."""


class StepReader:
    """Gives out each step of a term once and in order, whatever the bus lost, repeated or reordered.

    A higher term begins anew with its step 0; steps of older terms are dropped.

    Attributes:
        term: the term that is read; -1 before the first output.
        last: last step given out or given up; -1 before the first one.
    """

    def __init__(self, term: int | None = None) -> None:
        """With a `term`, every step of it is wanted; without, the reading begins with whatever comes first."""
        self.term = -1 if term is None else term
        self.last = -1
        self._begun = term is not None
        self._newest = -1
        self._aside: dict[int, StepOutput] = {}

    @property
    def missing(self) -> tuple[int, int] | None:
        """First and last step to ask for again: the executor has run them, and the next in order is among them."""
        if self._newest <= self.last:
            return None
        return self.last + 1, min(self._aside, default=self._newest + 1) - 1

    def feed(self, output: StepOutput) -> list[StepOutput]:
        """The outputs that are next in order, now that `output` is here; empty while one before it is missing."""
        if not self._enter(output.term) or output.step <= self.last:
            return []
        if not self._begun:
            self._begun, self.last = True, output.step - 1
        self._newest = max(self._newest, output.step)
        if output.step == self.last + 1 and not self._aside:
            self.last = output.step
            return [output]
        if output.step == self.last + 1 or len(self._aside) < KEPT:
            self._aside[output.step] = output
        return self._in_order()

    def hear(self, term: int, step: int) -> None:
        """The executor says that it has run `step`: so the last output can be missed, with none behind it."""
        if self._begun and self._enter(term):
            self._newest = max(self._newest, step)

    def skip(self) -> list[StepOutput]:
        """Gives up what is missing before the outputs that are kept aside, because nobody has it any more.

        Returns those outputs. Without any, the missing steps may still be on their way: nothing is given up.
        """
        if self._aside:
            self.last = min(self._aside) - 1
        return self._in_order()

    def _enter(self, term: int) -> bool:
        if term > self.term:
            self.term, self.last, self._newest = term, -1, -1
            self._aside.clear()
        return term == self.term

    def _in_order(self) -> list[StepOutput]:
        ready = []
        while (output := self._aside.pop(self.last + 1, None)) is not None:
            self.last += 1
            ready.append(output)
        return ready
