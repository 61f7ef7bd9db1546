"""The slot table: known tokens, computed positions and limits of each running sequence. No I/O, no device."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagewire.services.executor.devices.id_lists import IdLists
from pagewire.services.executor.devices.protocol import Bool, Capacity, Int64, StepBatch, positions_of, rows_and_places
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.steps.in_flight_step import NOTHING, InFlightStep, OutputColumns
from pagewire.services.executor.steps.packed_columns import column, entries, pairs
from pagewire.services.executor.steps.plan_checks import PlanChecks, PlanViolation
from pagewire.services.executor.steps.reported_prompts import ReportedPrompts
from pagewire.shared.messages.plan import AddSlot, Fork, Plan
from pagewire.shared.messages.step import Finish
from pagewire.shared.sampling_parameters import RECORD
from pagewire.shared.splitfuse import PendingTokens, compose, pace_forced

_STOP = np.uint8(Finish.STOP)
_NOT_FINITE = np.uint8(Finish.NOT_FINITE)


class _NewSequence(NamedTuple):
    """A sequence that is about to get a slot."""

    slot: int
    sequence: int
    tokens: Int64
    computed: int
    blocks: Int64
    limit: int
    end: int
    stop_ids: Int64
    reported_prompt: int = 0
    """Number of tokens of the prompt if its log-probabilities are reported."""


class SlotTable:
    """One sequence per slot:

        free ──(plan adds or forks)──> running ──(stop id, length or logits that are not finite)──> finished
         ^                                |                                                            |
         └─────────(plan removes)─────────┴────────────────────────────────────────────────────────────┘

    A finished sequence keeps its slot, without running, until a plan removes it; a new one may be held before it runs,
    while its grammar or its adapter is loaded.

    Each sequence has `known` tokens, some of which may still be sampled by a step in flight, and `computed` positions,
    whose KV is written or will be by a step in flight. A row computes further positions; a row that reaches the last
    known token samples the next one. Both numbers advance when a step is launched, so that the next step can be
    launched before the tokens have arrived. If such a token turns out to be a stop id, the sequence's rows in later
    steps are dead: they are left out when those steps are recorded.

    A device whose rows sample any number of tokens (`Capacity.max_row_tokens`) has no slot in two steps that sample:
    there, `known` is counted when a step is recorded. The same holds for steps with drafted tokens, which rows compute
    behind the known ones. Those that the device then samples are known and computed; the positions of the others count
    as never written.

    Nothing is launched beside a step with drafts. Where drafts are likely by the tokens before those in flight, the
    next step waits, so that they follow known ones.

    Tokens that a grammar forces are known when the step is launched that samples the token before them. They are part
    of its output, and the next rows of the sequence compute several of them at a time: all together where every
    sequence has a grammar, and otherwise so few that the others hardly wait.
    """

    def __init__(self, capacity: Capacity, speculator: Speculator | None = None) -> None:
        """`speculator` drafts tokens; None: no row has drafts."""
        slots = capacity.max_num_seqs
        self._capacity = capacity
        self._speculator = speculator
        self._checks = PlanChecks(capacity)
        self._several = capacity.max_row_tokens > 1 or speculator is not None  # whether rows may sample several tokens
        self._in_flight, self._drafting = 0, False  # steps that are not recorded, and whether one has drafts
        self._budget = 0
        self._order: Int64 = np.empty(0, np.int64)  # occupied slots, in the order in which prompts are served
        self._all: Bool = np.ones(slots, np.bool_)  # what every row is in a step without dead rows
        self._occupied: Bool = np.zeros(slots, np.bool_)
        self._running: Bool = np.zeros(slots, np.bool_)
        self._sequences: Int64 = np.zeros(slots, np.int64)
        self._admissions: Int64 = np.zeros(slots, np.int64)  # number of the admission that holds the slot
        self._awaited: Bool = np.zeros(slots, np.bool_)  # a step in flight samples an unknown number of tokens
        self._stopped: Int64 = np.zeros(slots, np.int64)  # the last admission that a stop id ended
        self._admitted, self._changes = 0, 0  # admissions; these, and ends that a step has reported
        self._tokens: Int64 = np.zeros((slots, capacity.max_model_len + 1), np.int64)
        self._known: Int64 = np.zeros(slots, np.int64)
        self._computed: Int64 = np.zeros(slots, np.int64)
        self._limits: Int64 = np.zeros(slots, np.int64)
        self._entries: Int64 = np.zeros(slots, np.int64)  # of the block table
        self._ends: Int64 = np.zeros(slots, np.int64)  # length, prompt included, at which each sequence ends
        self._stop_ids = IdLists(slots)
        self._forced: set[int] = set()  # slots with forced tokens that no step has computed yet
        self._structured: Bool = np.zeros(slots, np.bool_)  # whether the sequence of a slot has a grammar
        self._reported_prompts = ReportedPrompts()

    @property
    def has_work(self) -> bool:
        """Whether there is an unfinished sequence that is not held, within its limit or not."""
        return bool(self._running.any())

    @property
    def sequences(self) -> list[int]:
        """The ids of the sequences that have slots."""
        ids: list[int] = self._sequences[self._occupied].tolist()
        return ids

    def clear(self) -> None:
        """Frees every slot."""
        self._end_drafts(np.flatnonzero(self._occupied))
        self._order = self._order[:0]
        self._reported_prompts.clear()
        self._forced.clear()
        self._in_flight, self._drafting = 0, False
        self._occupied[:] = self._running[:] = False

    def apply(self, plan: Plan) -> None:
        """Applies a plan: removed, added, forks, blocks, limits and order, in this order.

        Forks read their source slots as they were before the plan. Slots that the plan's order does not name follow
        after those that it names, in their previous order.

        Raises:
            PlanViolation: the plan contradicts the table. Parts of it may have been applied.
        """
        try:
            # Most plans have only some of these fields, and an empty array costs as much as a short one.
            if plan.copies:
                self._checks.copies(*pairs(plan.copies))
            forked = [self._from_fork(fork) for fork in plan.forks]
            if plan.removed:
                self._free(column(plan.removed))
            if new := [*map(self._from_plan, plan.added), *forked]:
                for sequence in new:
                    self._allocate(sequence)
                self._order = np.append(self._order, [sequence.slot for sequence in new])
            if plan.blocks:
                self._extend(*entries(plan.blocks, 1 + len(self._capacity.windows)))
            if plan.limits:
                self._limit(*pairs(plan.limits))
            if plan.order:
                self._reorder(column(plan.order))
        except ValueError as error:
            raise PlanViolation(f"a packed column is cut off: {error}") from error
        if plan.budget < 1:
            raise PlanViolation(f"the plan's budget is {plan.budget} tokens per step")
        self._budget = plan.budget

    def tokens(self, slot: int) -> Int64:
        """Returns the tokens that the sequence of a slot came with, for one that no step was launched of."""
        return self._tokens[slot, : self._known[slot]].copy()

    def hold(self, slot: int, *, structured: bool) -> None:
        """Keeps a new sequence out of steps until `release`. `structured`: whether it has a grammar."""
        self._running[slot] = False
        self._structured[slot] = structured

    def release(self, slot: int) -> None:
        """Lets a sequence run that was held."""
        self._running[slot] = True

    def pending(self) -> PendingTokens:
        """Returns what each unfinished sequence could compute next, in order."""
        ready = self._running & ~self._awaited if self._several else self._running
        slots, forced = self._order[ready[self._order]], 0
        if self._forced:  # they go on with a text, and wait for no prompt
            first = np.isin(slots, list(self._forced))
            slots, forced = np.concatenate((slots[first], slots[~first])), int(np.count_nonzero(first))
        computed = self._computed[slots]
        remaining = self._known[slots] - computed
        if forced:
            others = int(np.count_nonzero(~self._structured[slots[forced:]]))
            remaining[:forced] = pace_forced(remaining[:forced], others)
        return PendingTokens(slots, remaining, self._limits[slots] - computed)

    def launch(self) -> InFlightStep | None:
        """Returns the next step, whose positions count as computed from now on; None when no sequence can go on yet."""
        if self._drafting:
            return None
        slots, query_lens = compose(self.pending(), self._budget)
        if not len(slots):
            return None
        computed, known = self._computed[slots], self._known[slots]
        ends = computed + query_lens
        samples, left, drafts = ends == known, None, None
        if self._speculator is not None and (drafts := self._draft(self._speculator, slots, ends, samples)) is not None:
            if self._in_flight:
                return None
            self._drafting = True
            query_lens = query_lens + drafts
        positions = positions_of(computed, query_lens)
        owners = slots if len(positions) == len(slots) else np.repeat(slots, query_lens)
        if drafts is not None or self._capacity.max_row_tokens > 1:
            left = self._count_left(slots)
            self._awaited[slots[samples]] = True
        known += samples
        full = samples & (known == self._ends[slots])
        if self._forced:
            self._forced.difference_update(slots[samples].tolist())
        next_ids = self._reported_prompts.next_ids(owners, positions, self._tokens)
        batch = StepBatch(slots, computed, query_lens, self._tokens[owners, positions], samples, next_ids, drafts)
        self._computed[slots] = ends
        self._known[slots] = known
        if np.count_nonzero(full):
            self._running[slots[full]] = False
        self._in_flight += 1
        stop_ids = self._stop_ids.table[slots]
        sequences, admissions = self._sequences[slots], self._admissions[slots]
        return InFlightStep(batch, sequences, admissions, stop_ids, full, self._changes, left)

    def _count_left(self, slots: Int64) -> Int64:
        """Returns how many tokens the sequences of these slots can have beside those that they have."""
        left: Int64 = np.minimum(self._ends[slots], self._capacity.max_model_len + 1) - self._known[slots]
        return left

    def _draft(self, speculator: Speculator, slots: Int64, ends: Int64, samples: Bool) -> Int64 | None:
        """Writes drafted tokens behind the known ones of rows that sample; returns their numbers [R], None: none has
        any. A row has fewer than the tokens that are left to it, and its slot's limit holds for them, too."""
        room = np.minimum(self._limits[slots] - ends, self._count_left(slots) - 1)
        known, positions = np.maximum(ends - self._in_flight, 1), int((ends - self._computed[slots]).sum())
        texts = slots[samples], known[samples], room[samples], self._tokens, positions
        drafts = speculator.draft_rows(*texts, in_flight=self._in_flight > 0)
        if not any(drafts):
            return None
        counts = np.zeros(len(slots), np.int64)
        counts[samples] = [len(tokens) for tokens in drafts]
        for slot, end, tokens in zip(slots[samples], ends[samples], drafts, strict=True) if not self._in_flight else ():
            self._tokens[slot, end : end + len(tokens)] = tokens
        return counts

    def _end_drafts(self, slots: Int64) -> None:
        """Ends the drafts for the sequences of these slots, which leave them. Tokens of steps in flight are unknown."""
        if self._speculator is not None:
            for slot, end in zip(slots.tolist(), (self._known[slots] - self._in_flight).tolist(), strict=True):
                self._speculator.end(slot, self._tokens[slot, : max(end, 0)].copy())

    def append_forced(self, step: InFlightStep, forced: Mapping[int, Sequence[int]]) -> None:
        """Appends to sequences of a launched step what follows the tokens that it samples: see `PendingStep.forced`."""
        for row, tokens in forced.items():
            slot, begin = int(step.batch.slots[row]), int(step.batch.ends[row]) + 1
            self._tokens[slot, begin : begin + len(tokens)] = tokens
            self._known[slot] = begin + len(tokens)
            self._forced.add(slot)

    def record(
        self,
        step: InFlightStep,
        tokens: Int64,
        counts: Int64 | None = None,
        forced: Mapping[int, Sequence[int]] = NOTHING,
    ) -> OutputColumns:
        """Records the `tokens` of a step, as `PendingStep.wait` returns them, and returns the columns of its output.

        `counts` [R] is the number of tokens of each row; None: `tokens` has one entry per row, which those that are
        `forced` follow.

        Steps are recorded in order of launch. A row launched after its sequence had ended is dead and left out of the
        columns. The row of a sequence removed meanwhile is in them, but does not change the slot's next sequence.
        """
        self._in_flight -= 1
        if counts is not None:
            self._drafting = False
            return self._record_many(step, tokens, counts)
        batch, finishes = step.batch, step.finishes(tokens)
        slots = batch.slots
        if step.changes == self._changes:
            alive = here = self._all[: len(slots)]
        else:
            alive = self._stopped[slots] != step.admissions  # a later admission can only stop in a later step
            here = alive & (self._admissions[slots] == step.admissions)
        if np.count_nonzero(finishes):
            stops = alive & ((finishes == _STOP) | (finishes == _NOT_FINITE))
            self._stopped[slots[stops]] = step.admissions[stops]
            self._running[slots[here & stops]] = False
            self._known[slots[here & stops]] = (batch.ends + (finishes == _STOP))[here & stops]
            self._changes += 1
        written = here & batch.samples
        if np.count_nonzero(written) == len(slots):
            self._tokens[slots, batch.ends] = tokens
        else:
            self._tokens[slots[written], batch.ends[written]] = tokens[written]
        if forced:
            return step.forced_columns(tokens, forced, finishes, alive)
        return step.columns(tokens, finishes, None if np.count_nonzero(alive) == len(slots) else alive)

    def _record_many(self, step: InFlightStep, tokens: Int64, counts: Int64) -> OutputColumns:
        """Records a step whose rows sampled any number of tokens, or had drafts. No row was launched again before: none
        is dead."""
        batch, slots, ends = step.batch, step.batch.slots, step.batch.ends
        tokens, counts, finishes = step.cut(tokens, counts)
        here = self._admissions[slots] == step.admissions
        sampled = here & batch.samples
        rows, places = rows_and_places(counts)
        written = here[rows]
        accepted = None
        if batch.num_drafts is not None:
            right = (places < batch.num_drafts[rows]) & (places < counts[rows] - 1)
            drafts = batch.query_lens.cumsum() - batch.num_drafts  # where those of each row begin
            right[right] = tokens[right] == batch.token_ids[(drafts[rows] + places)[right]]
            accepted = counts.copy()
            np.minimum.at(accepted, rows[~right], places[~right])
        self._tokens[slots[rows[written]], (ends[rows] + places)[written]] = tokens[written]
        self._known[slots[sampled]] = (ends + counts)[sampled]
        self._awaited[slots[sampled]] = False
        self._running[slots[sampled]] = finishes[sampled] == Finish.NONE
        again = sampled & (counts == 0)  # the next step computes the last position again, to sample from it
        self._computed[slots[again]] = ends[again] - 1
        if accepted is not None:
            self._accept(step, accepted, counts, sampled)
        return step.cut_columns(tokens, counts, finishes, accepted)

    def _accept(self, step: InFlightStep, accepted: Int64, counts: Int64, sampled: Bool) -> None:
        """Counts the positions of `accepted` [R] drafts as computed, in rows that `sampled` [R]. A grammar has forced
        the tokens behind these and the next one."""
        slots, drafts = step.batch.slots, step.batch.num_drafts
        assert drafts is not None
        assert self._speculator is not None
        self._computed[slots[sampled]] += accepted[sampled]
        self._forced.update(slots[sampled & (counts - accepted > 1)].tolist())
        for row in (sampled & (drafts > 0)).nonzero()[0].tolist():
            self._speculator.observe(int(slots[row]), int(drafts[row]), int(accepted[row]))

    def _free(self, slots: Int64) -> None:
        self._check_occupied(slots)
        self._reported_prompts.remove(slots)
        self._end_drafts(slots)
        self._occupied[slots] = self._running[slots] = False
        self._order = self._order[self._occupied[self._order]]

    def _from_plan(self, added: AddSlot) -> _NewSequence:
        tokens = column(added.tokens)
        if not 1 <= added.prompt_tokens <= len(tokens):
            raise PlanViolation(
                f"sequence {added.sequence} comes with {len(tokens)} tokens, {added.prompt_tokens} of them its prompt"
            )
        if len(added.sampling.record) != RECORD.itemsize:
            raise PlanViolation(f"sequence {added.sequence} has a sampling record of an unknown layout")
        self._checks.edits(added)
        end, stop_ids = added.prompt_tokens + added.sampling.max_tokens, column(added.sampling.stop_ids)
        blocks, reported = column(added.blocks), added.prompt_tokens if added.reports_prompt else 0
        return _NewSequence(
            added.slot, added.sequence, tokens, added.computed, blocks, added.limit, end, stop_ids, reported
        )

    def _from_fork(self, fork: Fork) -> _NewSequence:
        source = fork.source
        self._check_occupied(np.array([source]))
        if not 0 <= fork.computed <= self._computed[source]:
            raise PlanViolation(
                f"sequence {fork.sequence} is forked at {fork.computed} from a slot that has {self._computed[source]}"
            )
        tokens = np.concatenate((self._tokens[source, : fork.computed], column(fork.tokens)))
        blocks, end, stop_ids = column(fork.blocks), int(self._ends[source]), self._stop_ids.table[source].copy()
        return _NewSequence(fork.slot, fork.sequence, tokens, fork.computed, blocks, fork.limit, end, stop_ids)

    def _allocate(self, new: _NewSequence) -> None:
        slot, sequence, tokens, computed, blocks, limit, end, stop_ids, reported_prompt = new
        capacity = self._capacity
        if not 0 <= slot < capacity.max_num_seqs:
            raise PlanViolation(f"slot {slot} is not one of the {capacity.max_num_seqs} slots")
        if self._occupied[slot]:
            raise PlanViolation(f"slot {slot} is given to sequence {sequence} while it is in use")
        if not 1 <= len(tokens) <= capacity.max_model_len or len(tokens) >= end:
            raise PlanViolation(
                f"sequence {sequence} comes with {len(tokens)} tokens and ends at {end}; "
                f"the context is {capacity.max_model_len}"
            )
        if not 0 <= computed < len(tokens):
            raise PlanViolation(f"sequence {sequence}: {computed} of {len(tokens)} positions are computed")
        if (tokens >= capacity.vocab_size).any():
            raise PlanViolation(f"sequence {sequence} has token ids beyond the vocabulary")
        self._checks.blocks(blocks)
        held = self._checks.count_entries(blocks)
        self._checks.held(held)
        self._checks.reach(max(limit, computed) - held * capacity.block_size)
        self._occupied[slot] = self._running[slot] = True
        self._awaited[slot] = False
        self._forced.discard(slot)
        self._structured[slot] = False
        self._admitted += 1
        self._changes += 1
        self._sequences[slot], self._admissions[slot] = sequence, self._admitted
        self._tokens[slot, : len(tokens)] = tokens
        if self._speculator is not None:  # no token of an earlier sequence may be drafted for another tenant
            self._tokens[slot, len(tokens) :] = 0
        self._known[slot] = len(tokens)
        self._computed[slot] = computed
        self._ends[slot] = end
        self._stop_ids.set(slot, stop_ids)
        if reported_prompt:
            self._reported_prompts.add(slot, reported_prompt)
        self._entries[slot] = held
        self._limits[slot] = min(limit, capacity.max_model_len)

    def _extend(self, slots: Int64, blocks: Int64) -> None:
        self._check_occupied(slots)
        self._checks.blocks(blocks)
        np.add.at(self._entries, slots, 1)
        self._checks.held(int(self._entries[slots].max()))

    def _limit(self, slots: Int64, limits: Int64) -> None:
        self._check_occupied(slots)
        held = self._entries[slots] * self._capacity.block_size
        self._checks.reach(int((np.maximum(limits, self._computed[slots]) - held).max()))
        self._limits[slots] = np.minimum(limits, self._capacity.max_model_len)  # the last block may reach past it

    def _reorder(self, named: Int64) -> None:
        self._check_occupied(named)
        others = self._occupied.copy()
        others[named] = False
        if len(named) + np.count_nonzero(others) > len(self._order):
            raise PlanViolation("the plan's order names a slot twice")
        self._order = np.concatenate((named, self._order[others[self._order]]))

    def _check_occupied(self, slots: Int64) -> None:
        known = (slots >= 0) & (slots < len(self._occupied))
        if not known.all() or not self._occupied[slots].all():
            raise PlanViolation(f"the plan names slots without a sequence: {slots[:8].tolist()}")
