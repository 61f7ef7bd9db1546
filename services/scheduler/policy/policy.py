"""Decides what runs next: continuous batching over paged KV blocks, without I/O and without torch.

The executor composes its own steps. The policy gives it slots, blocks and a lease, and learns from step outputs what
was done. The policy keeps five promises:

- A plan is atomic. A block or slot that a plan takes from a live sequence is used again only after a step output has
  answered that plan. The blocks and the slot of a sequence that a step output reports as finished are free at once.
- A block is shared only after a step output has confirmed that it is written.
- Shorter prompts pass longer ones, but each prompt is passed for a bounded number of steps.
- The sequences of one step have at most `max_loras` adapters, and each adapter is passed for a bounded number of steps.
- The oldest sequence is never preempted for a younger one, and each sequence fits into the pool alone. So at any time
  at least one sequence makes progress.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from pagewire.services.scheduler.policy.adapter_admission import AdapterAdmission
from pagewire.services.scheduler.policy.beam_search.beam_scheduler import BeamGroup, BeamScheduler
from pagewire.services.scheduler.policy.budget import budget_of
from pagewire.services.scheduler.policy.prefill_queue import STEPS_AHEAD
from pagewire.services.scheduler.policy.prefix_cache import CachedPrefix
from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from pagewire.services.scheduler.policy.sequence_table import SequenceTable
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.services.scheduler.policy.waiting_queue import rank
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import AddSlot, Plan
from pagewire.shared.messages.step import ERRORS, NO_TOKEN, RING_STEPS, Finish, StepOutput

MAX_READER_LAG = RING_STEPS // 2
"""Steps that the slowest reader may be behind before the executor waits for it."""
URGENT_STEPS = 2
"""Steps behind the last one reported for whose blocks a younger sequence is preempted."""
MAX_DELAY = 32
"""Steps for which shorter prompts may get a slot before a prompt that is next in order."""
CANDIDATES = 256
"""Waiting sequences that are considered for one plan, at most."""


class Decision(NamedTuple):
    """The result of `Policy.schedule`. Sequences are named by the ids under which its caller knows them."""

    plan: Plan | None
    """The next plan; None: nothing has changed."""
    preempted: list[int]
    """Sequences that lose their slot to an older one."""
    expired: list[int]
    """Sequences that have ended because they waited past their deadline."""
    searches: list[BeamGroup]
    """Beam searches that have ended, with a result or with one of `step.ERRORS`."""


class Policy:
    """Decides which sequences of one term run.

    Attributes:
        step: last step output read; -1 before the first one.
        admits: whether waiting sequences get slots.
        num_steps: steps with rows that were reported. The lease counts these.
        max_row_tokens: the most tokens that a row of a step has brought.
    """

    def __init__(self, term: int, limits: TermLimits, before: "Policy | None" = None) -> None:
        """`before`: policy of the last term, if the executor still has its blocks, which are cached then."""
        self.term = term
        self.limits = limits
        self.budget = budget_of(limits)
        self.sequences: SequenceTable = SequenceTable(limits, before.sequences if before is not None else None)
        self.pool, self.running, self.waiting = self.sequences.pool, self.sequences.running, self.sequences.waiting
        self.beam_search = BeamScheduler(self.sequences)
        self.plan_number = 0
        self.step = -1
        self.admits = True
        self.num_steps = 0
        self.lease_until = 0
        self.preemptions = 0
        self.max_row_tokens = 1
        self._last_order: list[int] = []  # slots of two prompts or more: a single one needs no order
        self._last_budget = 0

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self.sequences.by_id)

    @property
    def step_tokens(self) -> int:
        """Token budget of the next plan."""
        return self.budget.tokens(len(self.running) - len(self.sequences.prefills))

    def stop_admission(self) -> None:
        """Gives no more slots to waiting sequences."""
        self.admits = False

    def add(self, sequence: Sequence) -> None:
        """Lets a new sequence wait for a slot. The caller has checked `TermLimits.fits`."""
        self.sequences.add(sequence)

    def abort(self, sequence_id: int) -> bool:
        """Ends a sequence or a beam search from outside; returns whether it had not ended already."""
        if (sequence := self.sequences.by_id.get(sequence_id)) is not None:
            self._count_ended(sequence)
        return self.sequences.abort(sequence_id) or self.beam_search.abort(sequence_id)

    def on_step(self, output: StepOutput) -> list[Sequence]:
        """Records what a step did. Outputs of one term arrive in order and without a gap.

        Returns the sequences that have sampled for the first time since they got their slot.
        """
        sequences = self.sequences
        by_id, needs_blocks, prefills = sequences.by_id, sequences.needs_blocks, sequences.prefills
        prefilled: list[Sequence] = []
        served: list[str] = []
        self.step = output.step
        self.num_steps += bool(output.sequences)
        ids, starts, counts = unpack(output.sequences), unpack(output.starts), unpack(output.counts)
        self.budget.observe(output.elapsed_us, sum(counts) + output.num_drafts)
        first, more = output.split_tokens()
        rows = zip(ids, map(by_id.get, ids), starts, counts, first, output.finishes, strict=True)
        longer = [(by_id[i], row_tokens) for i, row_tokens in more.items() if i in by_id]
        for i, sequence, start, count, token, finish in rows:
            if sequence is None:
                continue  # it was aborted, and the executor ran it before it had the plan
            sequence.num_computed_tokens = computed = start + count
            tokens = sequence.tokens
            if token != NO_TOKEN and computed == len(tokens):
                if i in prefills:
                    prefilled.append(prefills.pop(i))
                tokens.append(token)
                served.append(sequence.user)
                if computed >= sequence.blocks_last_until:
                    needs_blocks[i] = sequence
            else:
                sequence.last_step = self.num_steps
            if finish:
                sequence.finish = Finish(finish)
                self._count_ended(sequence)
                sequences.finish(sequence)
                if finish in ERRORS:
                    self.beam_search.fail(sequence)
        for user, count in _counted(served):
            self.waiting.charge(user, count)
        for sequence, row_tokens in longer:
            self._append_more(sequence, row_tokens)
        if output.candidate_counts:
            self.beam_search.receive(output)
        sequences.free_answered(output.plan)
        return prefilled

    def _append_more(self, sequence: Sequence, tokens: list[int]) -> None:
        """Appends the tokens of a row behind its first one, if that was appended."""
        if len(sequence.tokens) != sequence.num_computed_tokens + 1:
            return
        sequence.tokens += tokens
        self.waiting.charge(sequence.user, len(tokens))
        self.max_row_tokens = max(self.max_row_tokens, 1 + len(tokens))
        if 1 + len(tokens) > sequence.row_tokens < self.limits.block_size:
            sequence.row_tokens = min(1 + len(tokens), self.limits.block_size)
            if sequence.state is SequenceState.RUNNING:
                self.sequences.update_blocks_last_until(sequence)
        if sequence.state is SequenceState.RUNNING and len(sequence.tokens) > sequence.blocks_last_until:
            self.sequences.needs_blocks[sequence.id] = sequence

    def _count_ended(self, sequence: Sequence) -> None:
        """Tells the budget what a sequence has brought, if that had its first token."""
        if outputs := len(sequence.tokens) - sequence.num_prompt_tokens:
            self.budget.count(sequence.num_prompt_tokens - (sequence.num_cached_tokens or 0), outputs)

    @property
    def is_settled(self) -> bool:
        """Whether all sequences decode, with blocks for the steps ahead, and the lease lasts: no plan is needed."""
        sequences = self.sequences
        waits = self.waiting or sequences.prefills or sequences.needs_blocks or not self.beam_search.is_idle
        removes = sequences.pending_frees.removed_slots or self._last_order
        return not (waits or removes) and self.lease_until - self.num_steps > self.limits.window // 2

    def schedule(self, now: float, slowest_reader: int | None) -> Decision:
        """Decides what runs next. The caller repeats the call until there is no plan.

        `now` is Unix time in seconds, `slowest_reader` the last step that every live reader has read, None without one.
        """
        expired = self._end_expired(list(self.waiting.front), now)
        extended, preempted = self._allocate()
        forks, copies, searches = self.beam_search.fork(self.num_steps)
        admitted = self._admit(now, expired)
        prompts = self.sequences.prefills.in_order(self.num_steps)
        if prompts:
            extended += [pair for pair in self._extend_prompts(prompts) if pair[0] not in admitted]
        removed = self.sequences.pending_frees.removed_slots
        order = [sequence.slot for sequence in prompts] if len(prompts) > 1 else []
        lease, budget = self.num_steps + self._window(slowest_reader), self.step_tokens
        new_order = order != self._last_order
        new_budget = bool(self.running) and budget != self._last_budget
        lease_runs_out = self.lease_until - self.num_steps <= self.limits.window // 2 and lease > self.lease_until
        changed = extended or forks or admitted or removed or new_order or new_budget
        if not changed and not (self.running and lease_runs_out):
            return Decision(None, preempted, expired, searches)
        self.plan_number += 1
        self.lease_until = max(lease, self.lease_until)
        plan = Plan(
            term=self.term,
            number=self.plan_number,
            removed=pack(removed),
            added=tuple(map(self._add_slot, admitted)),
            blocks=pack(_entries(extended, self.sequences.groups.count)),
            limits=pack(value for s, _ in extended for value in (s.slot, self.limits.positions_held(s))),
            order=pack(order) if new_order else b"",
            budget=budget,
            lease_until=self.lease_until,
            forks=tuple(forks),
            copies=pack(copies),
        )
        self._last_budget, self._last_order = budget, order
        self.sequences.pending_frees.mark_sent(self.plan_number)
        return Decision(plan, preempted, expired, searches)

    def _window(self, slowest_reader: int | None) -> int:
        """Returns how many steps may follow the last one reported without a reader falling out of the ring."""
        if slowest_reader is None:
            return self.limits.window
        return max(0, min(self.limits.window, slowest_reader + MAX_READER_LAG - self.step))

    def _allocate(self) -> tuple[list[tuple[Sequence, list[int]]], list[int]]:
        """Gives running sequences blocks for the steps ahead, oldest first, and preempts the youngest where needed.

        Returns the sequences that have new blocks, each with these, and the preempted ones.
        """
        sequences = self.sequences
        extended: list[tuple[Sequence, list[int]]] = []
        preempted: list[int] = []
        if not sequences.needs_blocks:
            return extended, preempted
        coming = sum(map(sequences.count_freeable, sequences.pending_frees))
        for sequence in sorted(sequences.needs_blocks.values(), key=rank):
            if sequence.state is not SequenceState.RUNNING:
                sequences.needs_blocks.pop(sequence.id, None)  # it has been preempted for an older one
                continue
            if blocks := sequences.allocate_blocks(sequence):
                extended.append((sequence, blocks))
            if sequence.id not in sequences.needs_blocks:
                continue  # as nearly always: the pool had enough
            urgent = self.limits.missing_blocks(sequence, min(self.limits.lookahead, URGENT_STEPS))
            while urgent > coming and sequence.state is SequenceState.RUNNING:
                preempted.append(self.running[-1].caller_ids[0])
                coming += self._preempt(self.running[-1])
            if sequence.state is SequenceState.RUNNING:
                coming -= max(0, urgent)
        if preempted:
            extended = [pair for pair in extended if pair[0].state is SequenceState.RUNNING]
        return extended, preempted

    def _extend_prompts(self, prompts: list[Sequence]) -> Iterator[tuple[Sequence, list[int]]]:
        """Gives the prompts in progress, in this order, the blocks that the steps ahead can fill beside their decodes.

        Their other blocks stay reserved. Yields the prompts that have new blocks, each with these.
        """
        decodes = len(self.running) - len(self.sequences.prefills)
        tokens = self.limits.lookahead * (self.step_tokens - decodes)
        gives_back = bool(self.sequences.groups.windows)
        for sequence in prompts:
            if tokens <= 0:
                break
            extends = sequence.num_reserved_blocks or gives_back
            if extends and (blocks := self.sequences.extend_prompt(sequence, tokens)):
                yield sequence, blocks
            tokens -= len(sequence.tokens) - sequence.num_computed_tokens

    def _preempt(self, sequence: Sequence) -> int:
        """Preempts a sequence; returns how many blocks will become free, or have been reserved for it."""
        coming = self.sequences.count_freeable(sequence)
        self.sequences.preempt(sequence)
        self.preemptions += 1
        return coming

    def _admit(self, now: float, expired: list[int]) -> list[Sequence]:
        """Gives slots to waiting sequences, in order, while there is room for their blocks, which are reserved.

        Appends the sequences that it finds past their deadline to `expired`.
        """
        sequences = self.sequences
        admitted: list[Sequence] = []
        if not self.admits or not self.waiting or sequences.pending_frees.blocks_admission or not self._may_have_slot():
            return admitted
        plan_bytes = 0
        adapters: AdapterAdmission | None = None
        cutoff = sequences.prefills.cutoff(STEPS_AHEAD * self.step_tokens)
        for sequence in self._candidates(now, expired):
            if sequence.adapter:
                adapters = adapters or AdapterAdmission(self.running, self.limits.max_loras)
                if not adapters.admits(sequence, self.num_steps):
                    continue
            if (sequence.priority, len(sequence.tokens)) >= cutoff:
                if self._is_overdue(sequence):
                    break
                continue
            prefix = sequences.match_prefix(sequence)
            if prefix is None:
                continue  # an equal prompt is being computed: its blocks will be there soon
            plan_bytes += 4 * len(sequence.tokens) + len(sequence.sampling.grammar)
            if admitted and plan_bytes > self.limits.max_plan_bytes:
                break
            if not self._make_room(sequence, prefix):
                break
            sequences.allocate(sequence, prefix, self.num_steps)
            admitted.append(sequence)
            if adapters is not None:
                adapters.add(sequence)
            cutoff = sequences.prefills.cutoff(STEPS_AHEAD * self.step_tokens)
            if not self._may_have_slot():
                break
        return admitted

    def _candidates(self, now: float, expired: list[int]) -> Iterator[Sequence]:
        """Yields the waiting sequences that may get a slot, in order, and ends those past their deadline."""
        yield from list(self.waiting.front)
        for sequence in islice(self.waiting.in_order(), CANDIDATES):
            if sequence.deadline <= now:
                expired += self._end_expired([sequence], now)
            else:
                yield sequence

    def _is_overdue(self, sequence: Sequence) -> bool:
        """Returns whether a sequence that prompts in progress keep from its slot must not be passed any longer."""
        if sequence.delayed_since < 0:
            sequence.delayed_since = self.num_steps
        return self.num_steps - sequence.delayed_since >= MAX_DELAY

    def _may_have_slot(self) -> bool:
        """Returns whether there may be a slot: a free one, or that of a beam that can be evicted."""
        return self.sequences.num_free_slots > 0 or bool(self.beam_search)

    def _make_room(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Evicts beams until a slot and blocks are free; returns False if they do not suffice."""
        while True:
            spare = self.limits.watermark if self.running else 0
            if self.sequences.num_free_slots > 0 and self.sequences.has_room(sequence, prefix, spare):
                return True
            if not self.beam_search.evict(sequence):
                return False

    def _add_slot(self, sequence: Sequence) -> AddSlot:
        return AddSlot(
            slot=sequence.slot,
            sequence=sequence.id,
            tokens=pack(sequence.tokens),
            prompt_tokens=sequence.num_prompt_tokens,
            computed=sequence.num_computed_tokens,
            blocks=pack(sequence.blocks),
            limit=self.limits.positions_held(sequence),
            sampling=sequence.sampling,
            prompt_index=sequence.prompt_index,
            choice_index=sequence.choice_index,
            trace=sequence.trace,
            reports_prompt=sequence.reports_prompt,
            adapter=sequence.adapter,
            cache_salt=sequence.cache_salt,
        )

    def _end_expired(self, waiting: list[Sequence], now: float) -> list[int]:
        """Ends the sequences past their deadline, each with all others of its search; returns their caller's ids."""
        expired: list[int] = []
        for sequence in waiting:
            if sequence.state is SequenceState.WAITING and sequence.deadline <= now:
                self.abort(sequence.caller_ids[0])
                expired += sequence.caller_ids
        return expired


def _counted(users: list[str]) -> Iterable[tuple[str, int]]:
    """Returns the users with the number of times that each occurs."""
    if users and users.count(users[0]) == len(users):  # nearly always; a Counter takes several times as long
        return ((users[0], len(users)),)
    return Counter(users).items()


def _entries(extended: list[tuple[Sequence, list[int]]], groups: int) -> Iterator[int]:
    """Yields the slot of each new entry of a block table, and its blocks."""
    for sequence, blocks in extended:
        for i in range(0, len(blocks), groups):
            yield sequence.slot
            yield from blocks[i : i + groups]
