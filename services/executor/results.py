"""What the step loop reports to the service: results, one by one, and counters."""

from dataclasses import dataclass
from typing import NamedTuple

from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.step import StepOutput


class StepResult(NamedTuple):
    """One step output, with the plans that it answers."""

    output: StepOutput
    plans: list[Plan]
    """Plans applied right before the step's launch."""
    began: float
    """Start of the step, Unix time in seconds."""
    ended: float
    """End of the step, Unix time in seconds."""


class PlanRefused(NamedTuple):
    """A plan contradicted the slot table. The slots were freed, and nothing runs until a higher term begins."""

    term: int
    reason: str


@dataclass(slots=True)
class Counters:
    """Totals since the loop started."""

    waiting_s: float = 0.0
    """Seconds without a step in flight while there were unfinished sequences, because of the lease or the limits."""
    busy_s: float = 0.0
    """Seconds in which the device computed, by the device's clock."""
    steps: int = 0
    """Steps that have ended."""
    rows: int = 0
    """Rows of these steps."""
    tokens: int = 0
    """Token positions of these steps, which budgets count."""
    sampled: int = 0
    """Tokens that were sampled and reported."""
    num_slots: int = 0
    """Slots in use now."""
