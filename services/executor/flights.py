"""The steps in flight: given to the device in order, waited for in order, and timed."""

import math
import time
from collections import deque
from typing import NamedTuple

from pagewire.services.executor.devices.protocol import Candidates, Device, Int64, Pending
from pagewire.services.executor.flight import Flight
from pagewire.shared.messages.plan import Plan

_STEP_SECONDS = 20.0
_TOKEN_SECONDS = 0.5
"""What takes longer than this, plus this for each position in flight, does not come back."""


class Landed(NamedTuple):
    """A step that has ended."""

    flight: Flight
    tokens: Int64
    """[R] as `Pending.wait` gives them."""
    candidates: Candidates | None
    """As `Pending.candidates`."""
    plan: int
    plans: list[Plan]
    """As they were given with the launch."""
    elapsed: float
    """Seconds from its launch, or from the end of the step before if that is later, to its end."""


class Flights:
    """At most as many steps as the device's depth. Everything but `overdue` belongs to the device's thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._flights: deque[tuple[Flight, Pending, int, list[Plan], float]] = deque()
        self._landed = 0.0  # when the last step ended, on time.perf_counter
        self._due = math.inf
        self.positions = 0
        """That the device computes or is about to."""

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def full(self) -> bool:
        """Whether the oldest must land before another is launched."""
        return len(self._flights) == self._device.depth

    @property
    def overdue(self) -> bool:
        """Whether a step should have ended long ago, judged by the positions in flight."""
        return time.monotonic() > self._due

    def launch(self, flight: Flight, plan: int, plans: list[Plan]) -> None:
        """Gives a step to the device. `plan` is the number of the last one applied, `plans` what the step answers."""
        self._expect(len(flight.batch.token_ids))
        launched = time.perf_counter()
        self._flights.append((flight, self._device.launch(flight.batch), plan, plans, launched))

    def land(self) -> Landed:
        """Waits for the oldest step."""
        flight, pending, plan, plans, launched = self._flights.popleft()
        tokens = pending.wait()
        began, self._landed = max(launched, self._landed), time.perf_counter()
        self._expect(-len(flight.batch.token_ids))
        return Landed(flight, tokens, pending.candidates, plan, plans, self._landed - began)

    def drop(self) -> None:
        """Waits for all steps, and throws away what they made."""
        while self._flights:
            self.land()

    def _expect(self, more: int) -> None:
        self.positions += more
        patience = _STEP_SECONDS + _TOKEN_SECONDS * self.positions
        self._due = time.monotonic() + patience if self.positions else math.inf
