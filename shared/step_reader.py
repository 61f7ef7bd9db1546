"""Puts the step outputs of one executor in order."""

from pagewire.shared.messages.step import StepOutput

MAX_BUFFERED = 1024
"""Maximum number of outputs that are buffered after a gap. Further ones are dropped and must be asked for again."""


class StepReader:
    """Returns each step of a term once and in order, even if the bus loses, repeats or reorders outputs.

    A higher term restarts the reader at step 0; outputs of older terms are dropped.

    Attributes:
        term: the current term; -1 before the first output.
        last: the last step that was returned or given up; -1 before the first one.
    """

    def __init__(self, term: int | None = None) -> None:
        """With a `term`, reading starts at its step 0; without, at the first output that arrives."""
        self.term = -1 if term is None else term
        self.last = -1
        self._begun = term is not None
        self._newest = -1
        self._buffered: dict[int, StepOutput] = {}

    @property
    def missing(self) -> tuple[int, int] | None:
        """First and last step of the first gap: the executor has run these steps, and their outputs are missing."""
        if self._newest <= self.last:
            return None
        return self.last + 1, min(self._buffered, default=self._newest + 1) - 1

    def feed(self, output: StepOutput) -> list[StepOutput]:
        """Adds an output; returns the outputs that are now next in order, empty while an earlier one is missing."""
        if not self._enter(output.term) or output.step <= self.last:
            return []
        if not self._begun:
            self._begun, self.last = True, output.step - 1
        self._newest = max(self._newest, output.step)
        if output.step == self.last + 1 and not self._buffered:
            self.last = output.step
            return [output]
        if output.step == self.last + 1 or len(self._buffered) < MAX_BUFFERED:
            self._buffered[output.step] = output
        return self._in_order()

    def note_run(self, term: int, step: int) -> None:
        """Records that the executor has run `step`, which shows a gap even when no later output arrives."""
        if self._begun and self._enter(term):
            self._newest = max(self._newest, step)

    def skip(self) -> list[StepOutput]:
        """Gives up the missing steps before the buffered outputs, because the executor no longer has them.

        Returns the outputs that are now next in order. Without buffered outputs nothing is given up: the missing steps
        may still arrive.
        """
        if self._buffered:
            self.last = min(self._buffered) - 1
        return self._in_order()

    def _enter(self, term: int) -> bool:
        if term > self.term:
            self.term, self.last, self._newest = term, -1, -1
            self._buffered.clear()
        return term == self.term

    def _in_order(self) -> list[StepOutput]:
        ready = []
        while (output := self._buffered.pop(self.last + 1, None)) is not None:
            self.last += 1
            ready.append(output)
        return ready
