"""The step loop: runs on its own thread, as far as its lease allows, and takes in plans between two steps."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from services.executor.devices.protocol import Device, SlotSampling, StepBatch
from services.executor.inbox import Arrived, PlanInbox
from services.executor.sampling import sequence_key
from services.executor.slots import Columns, PlanViolation, SlotTable
from shared.messages import unpack
from shared.messages.plan import AddSlot, Plan
from shared.messages.step import StepOutput

_STEP_SECONDS = 20.0
_TOKEN_SECONDS = 0.5
"""A step that takes longer than this, plus this for each of its tokens, does not come back."""

_log = structlog.get_logger()


class Ran(NamedTuple):
    """One step output, and what led to it."""

    output: StepOutput
    plans: list[Plan]
    """Applied right before."""
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
    """Seconds without a step because of lease or limits, while sequences were unfinished."""
    busy_s: float = 0.0
    """Seconds in which the device computed, by its own clock."""
    steps: int = 0
    """Steps that the device ran."""
    rows: int = 0
    """Rows of these steps."""
    tokens: int = 0
    """Positions of these steps: what budgets count."""
    sampled: int = 0
    """Tokens that were picked."""
    num_slots: int = 0
    """Slots in use at this moment."""


class StepLoop:
    """Obeys plans. Everything but `overdue` and `counters` belongs to the thread of `run`."""

    def __init__(self, device: Device, inbox: PlanInbox, emit: Callable[[Ran | Refused], None]) -> None:
        self._device = device
        self._inbox = inbox
        self._emit = emit
        self._slots = SlotTable(device.capacity)
        self._held: set[int] = set()
        self._term = 0
        self._step = 0
        self._runs = 0  # steps with rows: what the lease counts
        self._plan = 0
        self._lease_until = 0
        self._refused = False
        self._due = math.inf
        self.counters = Counters()

    @property
    def overdue(self) -> bool:
        """Whether the step that runs now should have ended long ago, judged by its size."""
        return time.monotonic() > self._due

    def run(self) -> None:
        """Steps until the inbox is closed. An exception of the device ends the loop: its state is unknown then."""
        idle = True
        while (arrived := self._take(wait=idle)) is not None:
            if arrived.term != self._term:
                self._begin(arrived.term)
            idle = not self._advance(arrived.plans)

    def _advance(self, plans: list[Plan]) -> bool:
        """One step boundary and the step behind it; returns whether there was a step."""
        if self._refused:
            return False
        try:
            for plan in plans:
                self._apply(plan)
        except PlanViolation as error:
            self._refuse(str(error))
            return False
        batch = self._slots.next_batch() if self._runs < self._lease_until else None
        began = time.time()
        if batch is not None:
            self._runs += 1
            columns, elapsed = self._run_step(batch)
            self._answer(columns, plans, began, elapsed)
        elif plans:
            self._answer(Columns(), plans, began, 0.0)
        return batch is not None

    def _take(self, *, wait: bool) -> Arrived | None:
        if not wait:
            return self._inbox.take(wait=False)
        began = time.perf_counter()
        arrived = self._inbox.take(wait=True)
        if self._slots.has_work:
            self.counters.waiting_s += time.perf_counter() - began
        return arrived

    def _begin(self, term: int) -> None:
        self._empty()
        self._term, self._refused = term, False
        self._step = self._runs = self._plan = self._lease_until = 0

    def _refuse(self, reason: str) -> None:
        self._empty()
        self._refused = True
        self._emit(Refused(self._term, reason))

    def _empty(self) -> None:
        for slot in self._held:
            self._device.remove(slot)
        self._held.clear()
        self._slots.clear()
        self.counters.num_slots = 0

    def _apply(self, plan: Plan) -> None:
        self._slots.apply(plan)  # first: what it refuses never reaches the device
        removed = unpack(plan.removed)
        for slot in removed:
            self._device.remove(slot)
        for added in plan.added:
            self._device.add(added.slot, unpack(added.blocks), slot_sampling(added))
        if plan.blocks:
            table = unpack(plan.blocks)
            self._device.extend(table[::2], table[1::2])
        self._held.difference_update(removed)
        self._held.update(added.slot for added in plan.added)
        self.counters.num_slots = len(self._held)
        self._plan, self._lease_until = plan.number, plan.lease_until

    def _run_step(self, batch: StepBatch) -> tuple[Columns, float]:
        rows, positions = len(batch.slots), len(batch.token_ids)
        self._due = time.monotonic() + _STEP_SECONDS + _TOKEN_SECONDS * positions
        began = time.perf_counter()
        try:
            tokens = self._device.step(batch)
        except Exception:
            _log.exception("step_failed", term=self._term, step=self._step, rows=rows, tokens=positions)
            raise
        elapsed = time.perf_counter() - began
        self._due = math.inf
        counters = self.counters
        counters.busy_s = self._device.busy
        counters.steps += 1
        counters.rows += rows
        counters.tokens += positions
        counters.sampled += int(batch.samples.sum())
        return self._slots.take(batch, tokens), elapsed

    def _answer(self, columns: Columns, plans: list[Plan], began: float, elapsed: float) -> None:
        output = StepOutput(self._term, self._step, self._plan, *columns, elapsed_us=round(elapsed * 1e6))
        self._step += 1
        self._emit(Ran(output, plans, began, began + elapsed))


def slot_sampling(added: AddSlot) -> SlotSampling:
    """How the device picks the tokens of a sequence."""
    sampling = added.sampling
    return SlotSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        key=sequence_key(sampling.seed, added.prompt_index, added.choice_index),
        stop_ids=tuple(unpack(sampling.stop_ids)),
        floor=added.prompt_tokens + sampling.min_tokens,
    )
