"""The step loop: runs steps on its own thread as long as the lease allows, and applies plans between launches."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog

from pagewire.services.executor.adapter_loader import AdapterLoader, SequenceAdapter
from pagewire.services.executor.devices.protocol import Device
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar
from pagewire.services.executor.outputs.results import Counters, PlanRefused, StepMetrics, StepResult
from pagewire.services.executor.speculation.drafter import NewSequence
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.steps.grammar_opener import GrammarOpener
from pagewire.services.executor.steps.in_flight_step import CandidateColumns, LogprobColumns, OutputColumns
from pagewire.services.executor.steps.in_flight_steps import InFlightSteps
from pagewire.services.executor.steps.packed_columns import entries
from pagewire.services.executor.steps.plan_checks import PlanViolation
from pagewire.services.executor.steps.plan_inbox import NewPlans, PlanInbox
from pagewire.services.executor.steps.sampling_settings import SamplingSettings
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.shared.errors import DeviceLost
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import AddSlot, Plan
from pagewire.shared.messages.recent_steps import StepFigures
from pagewire.shared.messages.step import NO_TOKEN, StepOutput
from pagewire.shared.metrics.metric import Sample

_log = structlog.get_logger()
_NO_TOKEN = pack([NO_TOKEN])


class _Opening(NamedTuple):
    """A sequence that does not run until its grammar and its adapter are ready."""

    added: AddSlot
    grammar: SequenceGrammar | None
    adapter: SequenceAdapter | None

    @property
    def ready(self) -> bool:
        """Whether it can run, or never can."""
        return all(part is None or part.ready for part in (self.grammar, self.adapter))

    def abandon(self) -> None:
        """Opens nothing more, as the sequence has gone."""
        if self.grammar is not None:
            self.grammar.abandon()
        if self.adapter is not None:
            self.adapter.forget()


class StepLoop:
    """Applies plans and runs steps. Only the thread of `run` may use this class, except to read `overdue`, `broken`,
    `counters`, `metrics` and `samples`.

    Up to `Device.depth` steps are in flight: while the device computes one, the host launches the next and packs the
    output of the previous one. Outputs are emitted in order of launch.

    The slots and blocks that an output frees may be reused at once. When an output answers the removal of a live
    sequence, no step of that sequence is in flight any more. When an output reports that a sequence has finished, only
    dead rows of that sequence can be in flight, and the device computes them before any later step.

    A term goes through these states:

        begin ──> running ──(a plan contradicts the slot table, or a step raises)──> stopped
          ^          |                                                                 |
          └──────────┴────────────────────(a higher term begins)───────────────────────┘
    """

    def __init__(
        self,
        device: Device,
        inbox: PlanInbox,
        emit: Callable[[StepResult | PlanRefused], None],
        grammars: GrammarOpener | None = None,
        speculator: Speculator | None = None,
        adapters: AdapterLoader | None = None,
    ) -> None:
        """`grammars` opens the grammars of sequences, `adapters` loads their adapters; None: no sequence has one.
        `speculator` drafts tokens; None: no step has drafts."""
        self._device = device
        self._grammars = grammars
        self._adapters = adapters
        self._opening: dict[int, _Opening] = {}  # by slot, which is held meanwhile
        self._inbox = inbox
        self._emit = emit
        self._speculator = speculator
        self._slots = SlotTable(device.capacity, speculator)
        self._sampling: dict[int, SamplingSettings] = {}  # of each slot in use
        self._beyond_limits: set[int] = set()  # sequences that their grammars end, which threads of masks add, too
        self._term = 0
        self._step = 0
        self._runs = 0  # steps with rows, which the lease counts
        self._plan = 0
        self._reported_plan = 0  # plan of the last output
        self._lease_until = 0
        self._stopped = False
        self._unanswered: list[Plan] = []
        self._applying: Plan | None = None
        self._in_flight = InFlightSteps(device)
        device.on_lost(inbox.wake)
        self.counters = Counters()
        self.metrics = StepMetrics()
        self.broken = False
        """Whether an exception ends the loop: nothing can run any more."""

    @property
    def overdue(self) -> bool:
        """Whether a step takes much longer than expected."""
        return self._in_flight.overdue

    def samples(self) -> Iterator[Sample]:
        """Yields the figures of the steps and of the drafts."""
        yield from self.metrics.samples(self.counters)
        if self._speculator is not None:
            yield from self._speculator.samples()

    def run(self) -> None:
        """Runs steps until the inbox is closed. An exception ends the loop unless the device recovers from it.

        Raises:
            DeviceLost: the device is lost, which says nothing of the sequences in a step.
        """
        try:
            self._run()
        except DeviceLost as error:
            self.broken = True
            raise DeviceLost(self._device.lost or str(error)) from error

    def _run(self) -> None:
        idle = True
        while (new := self._take(wait=idle)) is not None:
            if new.term != self._term:
                self._begin(new.term)
            try:
                idle = not self._advance(new.plans)
            except DeviceLost:
                raise
            except Exception as error:
                if self._device.lost:  # by a rank, say: whatever was raised is its effect
                    raise DeviceLost(self._device.lost) from error
                self._fail()
                if self.broken:
                    raise
                self._in_flight.abandon()
                self._stop()
                idle = True
        while self._in_flight:
            self._collect()

    def _fail(self) -> None:
        """Reports the sequences that a plan was about to add, else those of the step that has raised, else all."""
        _log.exception("step_failed", term=self._term, step=self._step, tokens=self._in_flight.positions)
        added = [] if self._applying is None else [added.sequence for added in self._applying.added]
        failed = added or self._in_flight.sequences or self._slots.sequences
        self.broken = not (failed and self._device.recovers)
        now = time.time()
        output = StepOutput(self._term, self._step, self._plan, *OutputColumns()[:5], 0, failed=pack(failed))
        self._emit(StepResult(output, [], now, now))

    def _advance(self, plans: list[Plan]) -> bool:
        """Applies plans, launches a step if possible, and otherwise collects the oldest one.

        Returns whether there was anything to do; if so, the caller calls again without waiting for a plan.
        """
        if self._stopped:
            return False
        try:
            for plan in plans:
                self._applying = plan
                self._apply(plan)
            self._applying = None
        except PlanViolation as error:
            self._refuse(str(error))
            return False
        self._unanswered += plans
        if self._opening:
            self._let_opened_run()
        launched = self._runs < self._lease_until and self._launch()
        if launched and not self._in_flight.full:
            return True
        if self._in_flight:
            self._collect()
        elif self._unanswered:
            self._answer(OutputColumns(), self._plan, self._unanswered, 0.0)
            self._unanswered = []
        else:
            return False
        return True

    def _launch(self) -> bool:
        step = self._slots.launch()
        if step is None:
            return False
        self.metrics.lease_left.observe(self._lease_until - self._runs)
        self._runs += 1
        if forced := self._in_flight.launch(step, self._plan, self._unanswered):
            self._slots.append_forced(step, forced)
        self._unanswered = []
        return True

    def _let_opened_run(self) -> None:
        """Lets the sequences run whose grammars and adapters are ready by now, and ends those whose adapters are lost.

        Their output answers no plan, as earlier steps may be in flight.
        """
        lost: dict[int, int] = {}
        for slot in [slot for slot, opening in self._opening.items() if opening.ready]:
            opening = self._opening.pop(slot)
            if opening.adapter is not None and opening.adapter.lost:
                lost[opening.added.sequence] = opening.added.computed
            else:
                self._slots.release(slot)
        if lost:
            self._runs += 1
            self._answer(OutputColumns.of_lost_adapters(lost), self._reported_plan, [], 0.0)

    def _collect(self) -> None:
        """Waits for the oldest step and emits its output; a step without live rows has one only to answer plans."""
        step, tokens, pending, plan, plans, elapsed = self._in_flight.collect()
        columns = self._slots.record(step, tokens, pending.token_counts, pending.forced)
        if self._beyond_limits:
            columns = columns.blame_grammars(self._beyond_limits)
            self._beyond_limits.intersection_update(self._slots.sequences)
        counters = self.counters
        counters.busy_s = self._device.busy
        counters.steps += 1
        rows, positions = len(step.batch.slots), len(step.batch.token_ids)
        counters.rows += rows
        counters.tokens += positions
        prompt = 0
        if positions > rows:
            known = step.batch.ends - step.batch.num_computed_tokens
            prompt = int(known[known > 1].sum())
        counters.prefilled += prompt
        microseconds, lease_left = round(elapsed * 1e6), self._lease_until - self._runs
        self.metrics.recent.append(
            StepFigures(counters.steps, rows, prompt, positions - prompt, microseconds, lease_left)
        )
        self.metrics.size.observe(positions)
        self.metrics.duration.observe(elapsed)
        if self._speculator is not None:
            self._speculator.cost.observe(positions, elapsed)
            counters.drafted, counters.accepted = self._speculator.drafted, self._speculator.accepted
        counters.sampled += _count_sampled(columns.tokens)
        if not columns.sequences:
            self._runs -= 1  # the scheduler counts outputs with rows
        if pending.prompt_logprobs is not None:
            for part in step.logprob_columns(pending.prompt_logprobs, columns):
                self._answer(OutputColumns(), plan, [], 0.0, logprobs=part)
        if columns.sequences or plans:
            reported = None if pending.candidates is None else step.candidate_columns(pending.candidates)
            parts = [] if pending.logprobs is None else step.logprob_columns(pending.logprobs, columns)
            for part in parts[1:]:
                self._answer(OutputColumns(), plan, [], 0.0, logprobs=part)
            self._answer(columns, plan, plans, elapsed, reported, parts[0] if parts else None)

    def _take(self, *, wait: bool) -> NewPlans | None:
        if not wait:
            return self._inbox.take(wait=False)
        began = time.perf_counter()
        new = self._inbox.take(wait=True)
        if self._device.lost:
            raise DeviceLost(self._device.lost)
        if self._slots.has_work:
            self.counters.waiting_s += time.perf_counter() - began
        return new

    def _begin(self, term: int) -> None:
        self._empty()
        self._term, self._stopped = term, False
        self._step = self._runs = self._plan = self._reported_plan = self._lease_until = 0

    def _refuse(self, reason: str) -> None:
        self._stop()
        self._emit(PlanRefused(self._term, reason))

    def _stop(self) -> None:
        """Runs nothing until a higher term begins."""
        self._empty()
        self._stopped = True

    def _empty(self) -> None:
        self._in_flight.discard()
        self._unanswered, self._applying = [], None
        for slot in self._sampling:
            self._device.remove(slot)
            self._clear_adapter(slot)
        self._sampling.clear()
        for opening in self._opening.values():
            opening.abandon()
        self._opening.clear()
        self._beyond_limits.clear()
        self._slots.clear()
        self.counters.num_slots = 0

    def _apply(self, plan: Plan) -> None:
        self._slots.apply(plan)  # first, so that a refused plan never reaches the device
        if plan.copies:
            table = unpack(plan.copies)
            self._device.copy(table[::2], table[1::2])
        forks = [(fork.slot, unpack(fork.blocks), self._sampling[fork.source]) for fork in plan.forks]
        for slot in unpack(plan.removed):
            self._device.remove(slot)
            self._clear_adapter(slot)
            del self._sampling[slot]
            if (opening := self._opening.pop(slot, None)) is not None:
                opening.abandon()
        for added in plan.added:
            self._add(added.slot, unpack(added.blocks), self._open(added))
        for fork in forks:
            self._add(*fork)
        if plan.blocks:
            slots, blocks = entries(plan.blocks, 1 + len(self._device.capacity.windows))
            self._device.extend(slots.tolist(), blocks.tolist())
        self.counters.num_slots = len(self._sampling)
        self._plan, self._lease_until = plan.number, plan.lease_until

    def _open(self, added: AddSlot) -> SamplingSettings:
        """Begins to open the grammar and to load the adapter of a sequence, which runs when that is done."""
        grammar = adapter = None
        if added.sampling.grammar and self._grammars is not None:
            on_limit = partial(self._beyond_limits.add, added.sequence)
            grammar = self._grammars.open(added, self._inbox.wake, on_limit)
        if added.adapter:
            if self._adapters is None:
                raise PlanViolation(f"sequence {added.sequence} has an adapter, and this executor has not enable-lora")
            adapter = self._adapters.load(added.adapter, self._inbox.wake)
        if grammar is not None or adapter is not None:
            self._slots.hold(added.slot, structured=grammar is not None)
            self._opening[added.slot] = _Opening(added, grammar, adapter)
        return SamplingSettings.of(added, grammar, adapter)

    def _clear_adapter(self, slot: int) -> None:
        if self._adapters is not None and self._sampling[slot].adapter is not None:
            self._adapters.slots.clear(slot)

    def _add(self, slot: int, blocks: list[int], sampling: SamplingSettings) -> None:
        edits = sampling.edits
        if edits is not None:
            edits = replace(edits, tokens=self._slots.tokens(slot))
        self._device.add(slot, blocks, sampling.record, sampling.stop_ids, edits)
        if self._adapters is not None and sampling.adapter is not None:
            self._adapters.slots.assign(slot, sampling.adapter)
        self._sampling[slot] = sampling
        if self._speculator is not None and not sampling.record["num_candidates"]:  # which beams report
            sequence = NewSequence(sampling.record, len(self._slots.tokens(slot)), sampling.cache_salt)
            self._speculator.begin(slot, sequence, sampling.stop_ids, edits.grammar if edits else None)

    def _answer(
        self,
        columns: OutputColumns,
        plan: int,
        plans: list[Plan],
        elapsed: float,
        candidates: CandidateColumns | None = None,
        logprobs: LogprobColumns | None = None,
    ) -> None:
        output = StepOutput(
            self._term,
            self._step,
            plan,
            *columns[:5],
            round(elapsed * 1e6),
            *(candidates or CandidateColumns()),
            *(logprobs or LogprobColumns()),
            token_counts=columns.token_counts,
            drafts=columns.drafts,
        )
        self._step += 1
        self._reported_plan = plan
        ended = time.time()
        self._emit(StepResult(output, plans, ended - elapsed, ended))


def _count_sampled(tokens: bytes) -> int:
    """Returns how many entries of a packed column are tokens; nearly always it is all of them."""
    if _NO_TOKEN not in tokens:
        return len(tokens) // 4
    return int(np.count_nonzero(np.frombuffer(tokens, "<u4") != NO_TOKEN))
