"""What runs next: continuous batching over paged KV blocks, without I/O and without torch.

The executor composes its own steps; the policy gives it slots, blocks and a lease, and learns from step outputs what
was done. It keeps four promises:

- A plan is atomic, and a block or slot that a plan takes from a live sequence is used again only after a step output
  has answered that plan. What a step output reported as finished may be reused at once.
- A block is shared only once a step output has confirmed that it is written.
- Shorter prompts pass longer ones, but each is passed for a bounded number of steps.
- The oldest sequence is never preempted for a younger one, and each fits into the pool alone: something always ends.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import islice

from pagewire.services.scheduler.blocks import BlockPool, IntegrityError
from pagewire.services.scheduler.budget import budget_of
from pagewire.services.scheduler.departures import Departures
from pagewire.services.scheduler.forks import inherit
from pagewire.services.scheduler.limits import Limits
from pagewire.services.scheduler.ordering import Line, rank
from pagewire.services.scheduler.prefixes import Prefixes
from pagewire.services.scheduler.prompts import STEPS_AHEAD, Prompts
from pagewire.services.scheduler.searches import Searches
from pagewire.services.scheduler.sequence import Sequence, State
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import AddSlot, Fork, Plan
from pagewire.shared.messages.step import NO_TOKEN, RING_STEPS, Finish, StepOutput

NEVER = 1 << 62
"""A number of tokens that no sequence reaches."""
READERS_LAG = RING_STEPS // 2
"""Steps that the slowest reader may be behind. Then the executor waits for it."""
BLOCKS_AHEAD = 3
"""Steps behind the last one reported for which a sequence is given blocks, however long the lease is: two that are in
flight, and the one that is composed next. What is given earlier lies empty."""
URGENT = 2
"""Of these, the steps for whose blocks a younger sequence is preempted."""
HELD_STEPS = 32
"""Steps for which shorter prompts may get a slot before one whose turn it is."""
CANDIDATES = 256
"""Waiting sequences that are looked at for one plan."""


class Policy:
    """Slots, blocks and order of all sequences of one term."""

    def __init__(self, term: int, limits: Limits) -> None:
        self.term = term
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.budget = budget_of(limits)
        self.plan_number = 0
        self.step = -1
        """Last step output read."""
        self.runs = 0
        """Steps with rows among them, which the lease counts."""
        self.slowest_reader: int | None = None
        """Last step that every live reader has read; None while nobody reads."""
        self.lease_until = 0
        self.preemptions = 0
        self.now = 0.0
        """Unix time in seconds, as the caller tells it: what waits past its deadline gets no slot."""
        self.expired: list[int] = []
        """Ids of the sequences that ended so, for the caller to take."""
        self.waiting = Line()
        self.running: list[Sequence] = []
        """In order of rank."""
        self._sequences: dict[int, Sequence] = {}
        self._prefixes = Prefixes(self.pool, limits.block_size) if limits.prefix_cache else None
        self.prompts = Prompts()
        self.departures = Departures()
        self.searches = Searches()
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._short: dict[int, Sequence] = {}
        """Running sequences whose blocks do not last for the steps ahead, by id."""
        self._order: list[int] = []
        """Slots of the prompts in progress as the last plan ordered them."""
        self._sent = 0
        """Budget of the last plan."""

    @property
    def live(self) -> int:
        """Sequences that are not over."""
        return len(self._sequences)

    @property
    def step_tokens(self) -> int:
        """Budget of the next plan."""
        return self.budget.tokens(len(self.running) - len(self.prompts))

    def get(self, sequence_id: int) -> Sequence | None:
        """A sequence that is not over."""
        return self._sequences.get(sequence_id)

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits for a slot. The caller has checked `Limits.fits`."""
        self._sequences[sequence.id] = sequence
        self.waiting.add(sequence)

    def search(self, choices: list[Sequence]) -> None:
        """A beam search for these completions of one prompt. The first one's id is its own; `drop` takes that."""
        beam = self.searches.begin(choices)
        self._sequences[beam.id] = beam
        self.waiting.add(beam)

    def asked(self, sequence_id: int) -> int:
        """The id by which the caller knows what is in a slot: of a beam, that of its search."""
        sequence = self._sequences.get(sequence_id)
        return sequence_id if sequence is None or sequence.search is None else sequence.search.choices[0].id

    def drop(self, sequence_id: int) -> bool:
        """Ends a sequence or a search from outside: a stop string, a cancel. False if it was over already."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            search = self.searches.pop(sequence_id)
            for beam in search.members if search is not None else ():
                self.drop(beam.id)
            return search is not None
        if sequence.state is State.WAITING:
            if not self.searches.unstall(sequence):
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
            tokens = sequence.tokens
            if token != NO_TOKEN and computed == len(tokens):
                self.prompts.pop(i, None)
                tokens.append(token)
                self.waiting.charge(sequence.user, 1)
                if computed + 1 >= sequence.short_at:
                    self._short[i] = sequence
            if finish:
                self._finish(sequence, Finish(finish))
        if output.candidate_counts:
            self.searches.hear(output, self._sequences)
        for sequence in self.departures.answered(output.plan):
            self._left(sequence)

    def schedule(self) -> Plan | None:
        """The next plan, or None when nothing has changed. Called until it returns None."""
        for beam in list(self.searches.stalled):
            if beam.state is State.WAITING and beam.deadline <= self.now:
                self._expire(beam)
        grown = self._grow()
        forks, copies = self._fork()
        added = self._admit()
        order = self.prompts.order(self.runs)
        lease = self.runs + self._window()
        credit = self.lease_until - self.runs
        changed = bool(grown or forks or added or self.departures.slots or order != self._order)
        budget = self.step_tokens
        changed = changed or (bool(self.running) and self._sent != budget)
        if not changed and not (self.running and credit <= self.limits.window // 2 and lease > self.lease_until):
            return None
        self.plan_number += 1
        self.lease_until = max(lease, self.lease_until)
        plan = Plan(
            term=self.term,
            number=self.plan_number,
            removed=pack(self.departures.slots),
            added=tuple(added),
            blocks=pack(value for sequence, blocks in grown for block in blocks for value in (sequence.slot, block)),
            limits=pack(value for s, _ in grown for value in (s.slot, len(s.blocks) * self.limits.block_size)),
            order=pack(order) if order != self._order else b"",
            budget=budget,
            lease_until=self.lease_until,
            forks=tuple(forks),
            copies=pack(copies),
        )
        self._sent = budget
        self._order = order
        self.departures.send(self.plan_number)
        return plan

    def check(self) -> None:
        """The invariants that hold between any two calls.

        Raises:
            IntegrityError: a block or a slot is lost or has two owners.
        """
        leaving = list(self.departures)
        self.pool.check([s.blocks for s in (*self.running, *leaving)])
        slots = [s.slot for s in (*self.running, *leaving)] + self._free_slots
        if sorted(slots) != list(range(self.limits.max_num_seqs)):
            raise IntegrityError("a slot is lost or has two owners")
        waiting, stalled = list(self.waiting), self.searches.stalled
        if any(line != sorted(line, key=rank) for line in (self.running, waiting, stalled)):
            raise IntegrityError("the order is lost")
        waiting += stalled
        if any(s.state is not State.RUNNING for s in self.running) or any(w.blocks for w in waiting):
            raise IntegrityError("a sequence is where it should not be")
        if {id(s) for s in self._sequences.values()} - {id(s) for s in (*self.running, *leaving, *waiting)}:
            raise IntegrityError("a sequence is nowhere")
        if self._prefixes is not None and self._prefixes.open() != {s.id for s in (*self.running, *leaving)}:
            raise IntegrityError("a prefix is promised by nobody")

    @property
    def _ahead(self) -> int:
        return min(self.limits.window, BLOCKS_AHEAD)

    def _missing(self, sequence: Sequence, steps: int) -> int:
        """Blocks that it lacks for what could be written within `steps` steps behind the last one reported."""
        positions = min(len(sequence.tokens) - 1 + steps, sequence.last_position)
        return self.limits.blocks_for(positions) - len(sequence.blocks)

    def _grow(self) -> list[tuple[Sequence, list[int]]]:
        """Blocks for the steps ahead, oldest first; where they are needed now, the youngest gives its own."""
        grown: list[tuple[Sequence, list[int]]] = []
        if not self._short:
            return grown
        coming = sum(self.pool.sole(s.blocks) for s in self.departures)
        for sequence in sorted(self._short.values(), key=rank):
            if sequence.state is not State.RUNNING:
                continue  # preempted a moment ago for an older one
            short = self._missing(sequence, self._ahead)
            blocks = self.pool.allocate(min(short, self.pool.available))
            if blocks:
                sequence.blocks += blocks
                grown.append((sequence, blocks))
            if len(blocks) == short:
                del self._short[sequence.id]
                self._set_mark(sequence)
            urgent = self._missing(sequence, min(self._ahead, URGENT))
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

    def _set_mark(self, sequence: Sequence) -> None:
        """When its blocks must be looked at again: `on_step` compares, and otherwise passes on."""
        held = len(sequence.blocks) * self.limits.block_size
        sequence.short_at = NEVER if held >= sequence.last_position else held - self._ahead + 2

    def _admit(self) -> list[AddSlot]:
        """Gives slots and blocks to those that wait, in turn, while there is room."""
        added: list[AddSlot] = []
        if not (self.waiting or self.searches.stalled) or self.departures.makes_room:
            return added
        if not self._has_slot() and not self.searches:
            return added
        size = 0
        reach = self.prompts.reach(STEPS_AHEAD * self.step_tokens)
        for sequence in self._turns():
            if (sequence.priority, len(sequence.tokens)) >= reach:
                if self._held_long(sequence):
                    break
                continue
            shared = self._prefixes.known(sequence) if self._prefixes is not None else []
            if shared is None:
                continue  # an equal prompt is being computed: its blocks will be there soon
            size += 4 * len(sequence.tokens)
            if added and size > self.limits.max_plan_bytes:
                break
            needed = self._missing(sequence, self._ahead) - len(shared)
            while not (room := self._has_slot() and self._has_blocks(needed, shared)) and self._evict(sequence):
                pass
            if not room:
                break
            added.append(self._start(sequence, shared, needed))
            reach = self.prompts.reach(STEPS_AHEAD * self.step_tokens)
            if not self._has_slot() and not self.searches:
                break
        return added

    def _turns(self) -> Iterator[Sequence]:
        """Those that may get a slot, in turn: beams of what has begun, then what waits and has not expired."""
        yield from list(self.searches.stalled)
        for sequence in islice(self.waiting.turns(), CANDIDATES):
            if sequence.deadline <= self.now:
                self._expire(sequence)
            else:
                yield sequence

    def _has_blocks(self, needed: int, shared: list[int]) -> bool:
        """Whether there are so many blocks beside those that are shared."""
        available = self.pool.available - self.pool.idle(shared)
        return needed <= available - (self.limits.watermark if self.running else 0)

    def _expire(self, sequence: Sequence) -> None:
        """Nobody waits for it any more."""
        search = sequence.search
        ids = [sequence.id] if search is None else [choice.id for choice in search.choices]
        self.drop(ids[0])
        self.expired += ids

    def _has_slot(self) -> bool:
        return bool(self._free_slots) and len(self.running) < self.limits.max_running

    def _held_long(self, sequence: Sequence) -> bool:
        """Its turn has come, but the prompts before it fill the steps ahead: whether nobody may pass it any more."""
        if sequence.turn < 0:
            sequence.turn = self.runs
        return self.runs - sequence.turn >= HELD_STEPS

    def _start(self, sequence: Sequence, shared: list[int], needed: int) -> AddSlot:
        self.pool.share(shared)
        sequence.blocks = shared + self.pool.allocate(needed)
        sequence.computed = len(shared) * self.limits.block_size
        if not self.searches.unstall(sequence):
            self.waiting.begin(sequence)
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.waiting.charge(sequence.user, len(sequence.tokens) - sequence.computed)
        self._occupy(sequence, shared)
        self.prompts[sequence.id] = sequence
        return AddSlot(
            slot=sequence.slot,
            sequence=sequence.id,
            tokens=pack(sequence.tokens),
            prompt_tokens=sequence.prompt_tokens,
            computed=sequence.computed,
            blocks=pack(sequence.blocks),
            limit=sequence.halt or len(sequence.blocks) * self.limits.block_size,
            sampling=sequence.sampling,
            prompt_index=sequence.prompt_index,
            choice_index=sequence.choice_index,
            trace=sequence.trace,
        )

    def _occupy(self, sequence: Sequence, shared: list[int]) -> None:
        """It has its blocks, of which it shares the first ones, and gets a slot."""
        sequence.slot = self._free_slots.pop()
        sequence.state = State.RUNNING
        sequence.served = self.runs
        self._set_mark(sequence)
        insort(self.running, sequence, key=rank)
        if self._prefixes is not None:
            self._prefixes.begin(sequence, shared)

    def _leave(self, sequence: Sequence) -> None:
        """It runs no more."""
        self.running.remove(sequence)
        self._short.pop(sequence.id, None)
        if self.prompts.pop(sequence.id, None) is not None and self._prefixes is not None:
            self._prefixes.withdraw(sequence)

    def _vacate(self, sequence: Sequence, state: State) -> None:
        """The next plan takes the slot of a live sequence."""
        self._leave(sequence)
        sequence.state = state
        self.departures.add(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """The next plan empties the slot of a sequence that no step touches any more: all of it is free at once."""
        self._leave(sequence)
        self.departures.slots.append(sequence.slot)
        self._release(sequence)

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        """The executor has ended the sequence: the next plan empties its slot, which may be given away by then."""
        sequence.finish = finish
        del self._sequences[sequence.id]
        if sequence.state is State.RUNNING:
            self._retire(sequence)
        else:
            sequence.state = State.DROPPED  # it ended in the steps before its removal

    def _left(self, sequence: Sequence) -> None:
        """The executor has answered the plan that removed a live sequence."""
        preempted = sequence.state is State.PREEMPTED
        self._release(sequence)
        if preempted and sequence.reported:
            del self._sequences[sequence.id]  # its search has what it wanted
        elif preempted:
            sequence.state = State.WAITING
            sequence.blocks, sequence.computed = [], 0
            if sequence.search is not None:
                self.searches.stall(sequence)
            else:
                self.waiting.add(sequence)

    def _fork(self) -> tuple[list[Fork], list[int]]:
        """The next beams of the searches that have had a round, and pairs of blocks that are copied for them.

        Those for whom there is no slot or block, or nothing left of their parent, wait and are computed anew.
        """
        forks: list[Fork] = []
        copies: list[int] = []
        for search in self.searches.complete():
            parents, born = search.members, self.searches.advance(search)
            kept = {parent.id for _, parent in born}
            self._part(parent for parent in parents if parent.id not in kept)
            self._sequences |= {child.id: child for child, _ in born}
            alive = [(child, parent) for child, parent in born if parent.state is State.RUNNING]
            seats = min(len(self._free_slots), self.limits.max_running - len(self.running))
            seats += sum(parent.state is State.RUNNING for parent in parents)
            forked, pairs = inherit(self.pool, self.limits.block_size, alive, seats)
            copies += pairs
            self._part(parent for parent in parents if parent.id in kept)
            for child, source, shared in forked:
                self._occupy(child, child.blocks[:shared])
                position, blocks = child.halt - 1, pack(child.blocks)
                tokens = pack(child.tokens[position:])
                forks.append(Fork(child.slot, child.id, source, position, tokens, blocks, child.halt))
            for child, _ in born:
                if child.state is State.WAITING:
                    self.searches.stall(child)
        return forks, copies

    def _part(self, beams: Iterable[Sequence]) -> None:
        """Beams that have reported are needed no more."""
        for beam in beams:
            if beam.state is State.RUNNING:
                del self._sequences[beam.id]
                self._retire(beam)
            else:
                self.drop(beam.id)

    def _evict(self, sequence: Sequence) -> bool:
        """Makes room at once: the youngest beam at rest goes, unless it is older than `sequence`. False: there is none.

        So whatever waits for others holds nothing that an older one needs, and every search comes to its end.
        """
        at_rest = (beam for beam in reversed(self.running) if beam.reported) if self.searches else iter(())
        beam = next(at_rest, None)
        if beam is None or rank(beam) < rank(sequence):
            return False
        self._part([beam])
        return True

    def _release(self, sequence: Sequence) -> None:
        if self._prefixes is not None:
            self._prefixes.end(sequence)
        self.pool.release(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.state = State.FINISHED
