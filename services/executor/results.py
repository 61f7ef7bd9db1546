"""What the step loop tells the service: its results, one by one, and its counters."""

from dataclasses import dataclass
from typing import NamedTuple

from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.step import StepOutput


class Ran(NamedTuple):
    """One step output, and what led to it."""

    output: StepOutput
    plans: list[Plan]
    """Applied right before its launch."""
    began: float
    """Unix time in seconds."""
    ended: float
    """Unix time in seconds."""


class Refused(NamedTuple):
    """A plan contradicted the table. The slots are empty and nothing runs until a higher term begins."""

    term: int
    reason: str


@dataclass(slots=True)
class Counters:
    """What the loop did since it started."""

    waiting_s: float = 0.0
    """Seconds with no step in flight because of lease or limits, while sequences were unfinished."""
    busy_s: float = 0.0
    """Seconds in which the device computed, by its own clock."""
    steps: int = 0
    """Steps that the device ran."""
    rows: int = 0
    """Rows of these steps."""
    tokens: int = 0
    """Positions of these steps: what budgets count."""
    sampled: int = 0
    """Tokens that were picked and reported."""
    num_slots: int = 0
    """Slots in use at this moment."""
