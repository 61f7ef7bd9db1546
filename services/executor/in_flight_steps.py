"""The steps in flight: given to the device in order, waited for in order, and timed."""

import math
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from pagewire.services.executor.devices.protocol import Candidates, Device, Int64, Pending
from pagewire.services.executor.in_flight_step import InFlightStep
from pagewire.shared.messages.plan import Plan

_STEP_SECONDS = 20.0
_TOKEN_SECONDS = 0.5
"""A step that takes longer than this, plus this for each position in flight, is taken to be stuck."""


class CollectedStep(NamedTuple):
    """A step that has ended, with what the device made of it."""

    step: InFlightStep
    tokens: Int64
    """[R] as `Pending.wait` gives them."""
    candidates: Candidates | None
    """As `Pending.candidates`."""
    plan: int
    plans: list[Plan]
    """As they were given with the launch."""
    elapsed: float
    """Seconds from its launch, or from the end of the step before if that is later, to its end."""


class InFlightSteps:
    """At most as many steps as the device's depth. Everything but `overdue` belongs to the device's thread.

    A step is launched, computed behind those that were launched before it, and collected in that order.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: deque[tuple[InFlightStep, Pending, int, list[Plan], float]] = deque()
        self._unfinished: deque[InFlightStep] = deque()  # also one whose launch or end has raised
        self._ended = 0.0  # when the last collected step ended, on time.perf_counter
        self._due = math.inf
        self.positions = 0
        """That the device computes or is about to."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        """Whether the oldest must be collected before another is launched."""
        return len(self._steps) == self._device.depth

    @property
    def overdue(self) -> bool:
        """Whether a step should have ended long ago, judged by the positions in flight."""
        return time.monotonic() > self._due

    def launch(self, step: InFlightStep, plan: int, plans: list[Plan]) -> None:
        """Gives a step to the device. `plan` is the number of the last one applied, `plans` what the step answers."""
        self._expect(len(step.batch.token_ids))
        self._unfinished.append(step)
        launched = time.perf_counter()
        self._steps.append((step, self._device.launch(step.batch), plan, plans, launched))

    def collect(self) -> CollectedStep:
        """Waits for the oldest step and removes it."""
        step, pending, plan, plans, launched = self._steps.popleft()
        tokens = pending.wait()
        self._unfinished.popleft()
        began, self._ended = max(launched, self._ended), time.perf_counter()
        self._expect(-len(step.batch.token_ids))
        return CollectedStep(step, tokens, pending.candidates, plan, plans, self._ended - began)

    @property
    def sequences(self) -> list[int]:
        """Ids of the sequences in steps that have not ended, among them the step that has raised."""
        return sorted({int(sequence) for step in self._unfinished for sequence in step.sequences})

    def abandon(self) -> None:
        """Waits for all steps after one has raised; others may raise for the same reason."""
        while self._steps:
            with suppress(Exception):
                self.collect()
        self.discard()

    def discard(self) -> None:
        """Waits for all steps, and throws away what they made."""
        while self._steps:
            self.collect()
        self._unfinished.clear()
        self._expect(-self.positions)

    def _expect(self, more: int) -> None:
        self.positions += more
        patience = _STEP_SECONDS + _TOKEN_SECONDS * self.positions
        self._due = time.monotonic() + patience if self.positions else math.inf
