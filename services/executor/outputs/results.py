"""The reports of the step loop to the service: results, one by one, and counters."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.recent_steps import LATEST_STEPS, StepFigures
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Histogram, Sample


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
    """Seconds without a step in flight while there were sequences to run, because of the lease or the limits."""
    busy_s: float = 0.0
    """Seconds in which the device computed, by the device's clock."""
    steps: int = 0
    """Steps that have ended."""
    rows: int = 0
    """Rows of the steps that have ended."""
    tokens: int = 0
    """Token positions of the steps that have ended, which budgets count."""
    prefilled: int = 0
    """Token positions of rows that compute more than one, as a prompt does."""
    sampled: int = 0
    """Tokens that were sampled, or forced by grammars, and reported."""
    drafted: int = 0
    """Drafted tokens that steps have verified."""
    accepted: int = 0
    """Drafted tokens among them that were right."""
    num_slots: int = 0
    """Slots in use now."""


class StepMetrics:
    """The figures of all steps, written by the step thread."""

    def __init__(self) -> None:
        self.duration = Histogram(table.STEP_TIME)
        self.size = Histogram(table.STEP_TOKENS)
        self.lease_left = Histogram(table.LEASE_LEFT)
        self.recent: deque[StepFigures] = deque(maxlen=LATEST_STEPS)
        """The latest steps, which other threads may copy."""

    def samples(self, counters: Counters) -> Iterator[Sample]:
        """Yields the figures of the steps and of the counters."""
        yield table.STEPS.sample(counters.steps)
        yield table.STEP_TIME.sample(self.duration)
        yield table.STEP_TOKENS.sample(self.size)
        yield table.LEASE_LEFT.sample(self.lease_left)
        yield table.STEP_PHASES.sample(counters.prefilled, "prefill")
        yield table.STEP_PHASES.sample(counters.tokens - counters.prefilled, "decode")
        yield table.STEP_ROWS.sample(counters.rows)
        yield table.SAMPLED.sample(counters.sampled)
        yield table.BUSY.sample(counters.busy_s)
        yield table.STARVED.sample(counters.waiting_s)
        yield table.SLOTS.sample(counters.num_slots)
