"""The steps in flight: launched in order, collected in order, and timed."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from pagewire.services.executor.devices.protocol import Device, Int64, PendingStep
from pagewire.services.executor.steps.in_flight_step import InFlightStep
from pagewire.shared.messages.plan import Plan

STEP_SECONDS = 20.0
"""Seconds without progress after which a step counts as stuck, beside those for its positions."""
TOKEN_SECONDS = 0.5
"""Seconds that each position in flight adds to `STEP_SECONDS`."""


class CollectedStep(NamedTuple):
    """A step that has ended, with its results."""

    step: InFlightStep
    tokens: Int64
    """Sampled tokens, as `PendingStep.wait` returns them."""
    pending: PendingStep
    """The step as the device reports on it: log-probabilities, candidates."""
    plan: int
    """Number of the last plan that was applied before the launch."""
    plans: list[Plan]
    """Plans that the step's output answers."""
    elapsed: float
    """Seconds from the step's launch, or from the end of the previous step if that is later, to the step's end."""


class InFlightSteps:
    """A queue of launched steps, at most as many as the device's depth.

    Steps are computed and collected in the order of their launches. Only the device's thread may use this class, except
    for `overdue`.

    Attributes:
        positions: token positions of all steps in flight.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: deque[tuple[InFlightStep, PendingStep, int, list[Plan], float]] = deque()
        self._unfinished: deque[InFlightStep] = deque()  # also one whose launch or end has raised
        self._ended = 0.0  # when the last collected step ended, on time.perf_counter
        self._due = math.inf
        self._progress = 0.0
        self._progressed_at = -math.inf  # when `overdue` saw the device's progress change, on the monotonic clock
        self.positions = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        """Whether the oldest step must be collected before another can be launched."""
        return len(self._steps) == self._device.depth

    @property
    def overdue(self) -> bool:
        """Whether a step takes much longer than expected for the positions in flight, since the device's last progress.

        A starved device computes for as long as it takes, and one that hangs makes no progress.
        """
        now, progress = time.monotonic(), self._device.progress
        if progress != self._progress:
            self._progress, self._progressed_at = progress, now
        return now > max(self._due, self._progressed_at + _patience(self.positions))

    def launch(self, step: InFlightStep, plan: int, plans: list[Plan]) -> Mapping[int, Sequence[int]]:
        """Launches a step. `plan` is the number of the last plan applied; the step's output answers `plans`.

        Returns `PendingStep.forced` of the step.
        """
        self._expect(len(step.batch.token_ids))
        self._unfinished.append(step)
        launched = time.perf_counter()
        pending = self._device.launch(step.batch)
        self._steps.append((step, pending, plan, plans, launched))
        return pending.forced

    def collect(self) -> CollectedStep:
        """Waits for the oldest step, removes it and returns it."""
        step, pending, plan, plans, launched = self._steps.popleft()
        tokens = pending.wait()
        self._unfinished.popleft()
        began, self._ended = max(launched, self._ended), time.perf_counter()
        self._expect(-len(step.batch.token_ids))
        return CollectedStep(step, tokens, pending, plan, plans, self._ended - began)

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
        """Waits for all steps and drops their results."""
        while self._steps:
            self.collect()
        self._unfinished.clear()
        self._expect(-self.positions)

    def _expect(self, more: int) -> None:
        self.positions += more
        self._due = time.monotonic() + _patience(self.positions) if self.positions else math.inf


def _patience(positions: int) -> float:
    return STEP_SECONDS + TOKEN_SECONDS * positions
