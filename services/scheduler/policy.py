"""What runs next: continuous batching over paged KV blocks, without I/O and without torch.

The executor composes its own steps; the policy gives it slots, blocks and a lease, and learns from step outputs what
was done. It keeps four promises:

- A plan is atomic, and a block or slot that a plan takes from a live sequence is used again only after a step output
  has answered that plan. What a step output reported as finished may be reused at once.
- A block is shared only once a step output has confirmed that it is written.
- Shorter prompts pass longer ones, but a prompt in progress is passed for a bounded number of steps.
- The oldest sequence is never preempted for a younger one, and each fits into the pool alone: something always ends.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from services.scheduler.blocks import BlockPool, IntegrityError
from services.scheduler.budget import Budget
from services.scheduler.sequence import Sequence, State
from shared.messages import pack, unpack
from shared.messages.plan import AddSlot, Plan
from shared.messages.step import NO_TOKEN, RING_STEPS, Finish, StepOutput

NEVER = 1 << 62
"""A number of tokens that no sequence reaches."""
READERS_LAG = RING_STEPS // 2
"""Steps that the slowest reader may be behind. Then the executor waits for it."""
PATIENCE = 8
"""Steps for which shorter prompts may pass a prompt in progress; then it goes first for a step."""

_RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the executor offers and the settings ask for."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    """Slots."""
    budget: int
    """Tokens per step."""
    window: int
    """Steps that the executor may run beyond the last one reported."""
    prefix_cache: bool = True
    itl_target_ms: float | None = None
    """Inter-token latency that the budget is shrunk for; None: it stays as it is."""
    max_plan_bytes: int = 512 * 1024
    """Tokens of added slots in one plan, in bytes; the rest goes into the next plan."""

    @property
    def max_running(self) -> int:
        """Slots that may be in use: every step can decode them all and has a block's worth of prompt left over."""
        spare = min(self.block_size, self.budget // 2)
        return max(1, min(self.max_num_seqs, self.budget - spare))

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free, so that running sequences can grow before anyone is preempted."""
        return self.num_blocks // 100


class Policy:
    """Slots, blocks and order of all sequences of one term."""

    def __init__(self, term: int, limits: Limits) -> None:
        self.term = term
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.budget = Budget(limits.budget, limits.max_running + limits.block_size, limits.itl_target_ms)
        self.plan_number = 0
        self.step = -1
        """Last step output read."""
        self.runs = 0
        """Steps with rows among them, which the lease counts."""
        self.slowest_reader: int | None = None
        """Last step that every live reader has read; None while nobody reads."""
        self.lease_until = 0
        self.preemptions = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """In order of rank."""
        self._sequences: dict[int, Sequence] = {}
        self._leaving: deque[tuple[int, Sequence]] = deque()
        """Live sequences that a plan removed, with its number, until the plan is answered."""
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._vacated: list[int] = []
        """Slots that the next plan removes."""
        self._removed: list[Sequence] = []
        """Live sequences whose slots are among them."""
        self._writing: dict[bytes, Sequence] = {}
        """Prefixes that a running prompt is about to confirm."""
        self._short: dict[int, Sequence] = {}
        """Running sequences whose blocks do not last for the lease ahead, by id."""
        self._prompts: dict[int, Sequence] = {}
        """Running sequences that have not sampled since their admission, by id."""
        self._order: list[int] = []
        """Slots of the prompts in progress as the last plan ordered them."""
        self._sent = 0
        """Budget of the last plan."""

    @property
    def live(self) -> int:
        """Sequences that are not over."""
        return len(self._sequences)

    def get(self, sequence_id: int) -> Sequence | None:
        """A sequence that is not over."""
        return self._sequences.get(sequence_id)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool could hold it alone, to its last token."""
        return self._blocks_for(sequence.last_position) <= self.limits.num_blocks

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits for a slot. The caller has checked `fits`."""
        self._sequences[sequence.id] = sequence
        insort(self.waiting, sequence, key=_RANK)

    def drop(self, sequence_id: int) -> bool:
        """Ends a sequence from outside: a stop string, a cancel. False if it was over already."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            sequence.state = State.FINISHED
        elif sequence.state is State.RUNNING:
            self._vacate(sequence, State.DROPPED)
        else:
            sequence.state = State.DROPPED
        return True

    def on_step(self, output: StepOutput) -> None:
        """Takes in what a step did. Outputs of one term arrive in order and without a gap."""
        self.step = output.step
        self.runs += bool(output.sequences)
        ids, starts, counts = unpack(output.sequences), unpack(output.starts), unpack(output.counts)
        self.budget.observe(output.elapsed_us, sum(counts))
        for i, start, count, token, finish in zip(
            ids, starts, counts, unpack(output.tokens), output.finishes, strict=True
        ):
            sequence = self._sequences.get(i)
            if sequence is None:
                continue  # it was dropped; the executor had not heard of it yet
            sequence.computed = computed = start + count
            sequence.served = self.runs
            if token != NO_TOKEN:
                if i in self._prompts:
                    del self._prompts[i]
                tokens = sequence.tokens
                if computed == len(tokens):
                    tokens.append(token)
                    if computed + 1 >= sequence.short_at:
                        self._short[i] = sequence
            if computed >= sequence.full_at:
                self._publish(sequence)
            if finish:
                self._finish(sequence, Finish(finish))
        while self._leaving and self._leaving[0][0] <= output.plan:
            self._left(self._leaving.popleft()[1])

    def schedule(self) -> Plan | None:
        """The next plan, or None when nothing has changed. Called until it returns None."""
        grown = self._grow()
        added = self._admit()
        order = self._serve_order()
        lease = self.runs + self._window()
        credit = self.lease_until - self.runs
        changed = bool(grown or added or self._vacated or order != self._order)
        changed = changed or (bool(self.running) and self._sent != self.budget.tokens)
        if not changed and not (self.running and credit <= self.limits.window // 2 and lease > self.lease_until):
            return None
        self.plan_number += 1
        self.lease_until = max(lease, self.lease_until)
        plan = Plan(
            term=self.term,
            number=self.plan_number,
            removed=pack(self._vacated),
            added=tuple(added),
            blocks=pack(value for sequence, blocks in grown for block in blocks for value in (sequence.slot, block)),
            limits=pack(value for s, _ in grown for value in (s.slot, len(s.blocks) * self.limits.block_size)),
            order=pack(order) if order != self._order else b"",
            budget=self.budget.tokens,
            lease_until=self.lease_until,
        )
        self._sent = plan.budget
        self._leaving.extend((self.plan_number, sequence) for sequence in self._removed)
        self._vacated, self._removed, self._order = [], [], order
        return plan

    def check(self) -> None:
        """The invariants that hold between any two calls.

        Raises:
            IntegrityError: a block or a slot is lost or has two owners.
        """
        leaving = [sequence for _, sequence in self._leaving] + self._removed
        self.pool.check([s.blocks for s in (*self.running, *leaving)])
        slots = [s.slot for s in (*self.running, *leaving)] + self._free_slots
        if sorted(slots) != list(range(self.limits.max_num_seqs)):
            raise IntegrityError("a slot is lost or has two owners")
        if self.running != sorted(self.running, key=_RANK) or self.waiting != sorted(self.waiting, key=_RANK):
            raise IntegrityError("the order is lost")
        if any(s.state is not State.RUNNING for s in self.running) or any(w.blocks for w in self.waiting):
            raise IntegrityError("a sequence is where it should not be")
        if not self._writing.keys() <= {digest for s in self.running for digest in s.hashes}:
            raise IntegrityError("a prefix is promised by nobody")

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.limits.block_size)

    def _horizon(self, sequence: Sequence, steps: int) -> int:
        """Positions that could be written within `steps` steps after the last one reported."""
        return min(len(sequence.tokens) - 1 + steps, sequence.last_position)

    def _grow(self) -> list[tuple[Sequence, list[int]]]:
        """Blocks for the lease ahead, oldest first; who cannot make two more steps takes the youngest's."""
        grown: list[tuple[Sequence, list[int]]] = []
        if not self._short:
            return grown
        coming = sum(self.pool.sole(s.blocks) for _, s in self._leaving) + sum(
            self.pool.sole(s.blocks) for s in self._removed
        )
        for sequence in sorted(self._short.values(), key=_RANK):
            if sequence.state is not State.RUNNING:
                continue  # preempted a moment ago for an older one
            short = self._blocks_for(self._horizon(sequence, self.limits.window)) - len(sequence.blocks)
            blocks = self.pool.allocate(min(short, self.pool.available))
            if blocks:
                sequence.blocks += blocks
                grown.append((sequence, blocks))
            if len(blocks) == short:
                del self._short[sequence.id]
                self._set_marks(sequence)
            urgent = self._blocks_for(self._horizon(sequence, min(self.limits.window, 2))) - len(sequence.blocks)
            while urgent > coming and sequence.state is State.RUNNING:
                victim = self.running[-1]
                coming += self.pool.sole(victim.blocks)
                self._vacate(victim, State.PREEMPTED)
                self.preemptions += 1
            if sequence.state is State.RUNNING:
                coming -= max(0, urgent)
        return [(sequence, blocks) for sequence, blocks in grown if sequence.state is State.RUNNING]

    def _window(self) -> int:
        """Steps that may follow the last one reported: never so many that a reader could fall out of the ring."""
        if self.slowest_reader is None:
            return self.limits.window
        return max(0, min(self.limits.window, self.slowest_reader + READERS_LAG - self.step))

    def _serve_order(self) -> list[int]:
        """Slots of the prompts in progress, if there are several: shortest first, after those passed for too long."""
        if len(self._prompts) < 2:
            return []
        prompts = sorted(
            self._prompts.values(),
            key=lambda s: (s.priority, self.runs - s.served < PATIENCE, len(s.tokens) - s.computed, s.arrival),
        )
        return [sequence.slot for sequence in prompts]

    def _set_marks(self, sequence: Sequence) -> None:
        """When the sequence must be looked at again: `on_step` compares, and otherwise passes on."""
        held = len(sequence.blocks) * self.limits.block_size
        enough = held >= sequence.last_position
        sequence.short_at = NEVER if enough else held - self.limits.window + 2
        cached = self.limits.prefix_cache
        sequence.full_at = (sequence.published + 1) * self.limits.block_size if cached else NEVER

    def _admit(self) -> list[AddSlot]:
        """Gives slots and blocks to those that wait, in order of rank, while there is room."""
        added: list[AddSlot] = []
        size = 0
        if not self.waiting:
            return added
        if any(sequence.state is State.PREEMPTED for _, sequence in self._leaving) or self._removed:
            return added  # room is being made for those that run already
        for sequence in list(self.waiting):
            if len(self.running) >= self.limits.max_running or not self._free_slots:
                break
            size += 4 * len(sequence.tokens)
            if added and size > self.limits.max_plan_bytes:
                break
            shared = self._known_prefix(sequence)
            if shared is None:
                continue  # an equal prompt is being computed: its blocks will be there soon
            needed = self._blocks_for(self._horizon(sequence, self.limits.window)) - len(shared)
            available = self.pool.available - self.pool.evictable(shared)
            if needed > available - (self.limits.watermark if self.running else 0):
                break
            self.waiting.remove(sequence)
            added.append(self._start(sequence, shared, needed))
        return added

    def _known_prefix(self, sequence: Sequence) -> list[int] | None:
        """Confirmed blocks of the sequence's prefix; None while a running prompt is about to confirm more of it."""
        if not self.limits.prefix_cache:
            return []
        hashes = sequence.hash_blocks((len(sequence.tokens) - 1) // self.limits.block_size, self.limits.block_size)
        shared = self.pool.match(hashes)
        if len(shared) < len(hashes) and hashes[len(shared)] in self._writing:
            return None
        return shared

    def _start(self, sequence: Sequence, shared: list[int], needed: int) -> AddSlot:
        self.pool.share(shared)
        sequence.blocks = shared + self.pool.allocate(needed)
        sequence.computed = len(shared) * self.limits.block_size
        sequence.published = len(shared)
        if sequence.cached is None:
            sequence.cached = sequence.computed
        sequence.slot = self._free_slots.pop()
        sequence.state = State.RUNNING
        sequence.served = self.runs
        self._set_marks(sequence)
        insort(self.running, sequence, key=_RANK)
        self._prompts[sequence.id] = sequence
        for digest in sequence.hashes[len(shared) :]:
            self._writing.setdefault(digest, sequence)
        return AddSlot(
            slot=sequence.slot,
            sequence=sequence.id,
            tokens=pack(sequence.tokens),
            prompt_tokens=sequence.prompt_tokens,
            computed=sequence.computed,
            blocks=pack(sequence.blocks),
            limit=len(sequence.blocks) * self.limits.block_size,
            sampling=sequence.sampling,
            prompt_index=sequence.prompt_index,
            choice_index=sequence.choice_index,
            trace=sequence.trace,
        )

    def _publish(self, sequence: Sequence) -> None:
        """Tells the prefix index of the blocks that are confirmed full."""
        full = sequence.computed // self.limits.block_size
        hashes = sequence.hash_blocks(full, self.limits.block_size)
        for i in range(sequence.published, full):
            self.pool.publish(sequence.blocks[i], hashes[i])
            if self._writing.get(hashes[i]) is sequence:
                del self._writing[hashes[i]]
        sequence.published = full
        self._set_marks(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """It runs no more. Whoever waits for its prefix computes it itself."""
        self.running.remove(sequence)
        self._vacated.append(sequence.slot)
        self._prompts.pop(sequence.id, None)
        self._short.pop(sequence.id, None)
        for digest in sequence.hashes[sequence.published :]:
            if self._writing.get(digest) is sequence:
                del self._writing[digest]

    def _vacate(self, sequence: Sequence, state: State) -> None:
        """The next plan takes the slot of a live sequence."""
        self._leave(sequence)
        sequence.state = state
        self._removed.append(sequence)

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        """The executor has ended the sequence."""
        sequence.finish = finish
        del self._sequences[sequence.id]
        if sequence.state is State.RUNNING:
            self._leave(sequence)
            self._release(sequence)
        else:
            sequence.state = State.DROPPED  # it ended in the steps before its removal

    def _left(self, sequence: Sequence) -> None:
        """The executor has answered the plan that removed a live sequence."""
        preempted = sequence.state is State.PREEMPTED
        self._release(sequence)
        if preempted:
            sequence.state = State.WAITING
            sequence.blocks, sequence.computed, sequence.published = [], 0, 0
            insort(self.waiting, sequence, key=_RANK)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.state = State.FINISHED
