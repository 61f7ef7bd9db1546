"""The sequences of one term with their slots and blocks, and the transitions between their states."""

from bisect import insort

from pagewire.services.scheduler.policy.block_groups import BlockGroups
from pagewire.services.scheduler.policy.block_pool import BlockPool, IntegrityError
from pagewire.services.scheduler.policy.pending_frees import PendingFrees
from pagewire.services.scheduler.policy.prefill_queue import PrefillQueue
from pagewire.services.scheduler.policy.prefix_cache import CachedPrefix, PrefixCache
from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.services.scheduler.policy.waiting_queue import WaitingQueue, rank

NEVER = 1 << 62
"""A number of tokens that no sequence reaches."""


class SequenceTable:
    """The sequences that hold slots and blocks, and those that wait for them. `SequenceState` draws the transitions.

    Attributes:
        by_id: sequences that have not ended.
        running: sequences that hold a slot, in order of rank.
        needs_blocks: running sequences whose blocks do not last for the steps ahead, by id.
        cache_queries: tokens so far that were looked for in the prefix cache, once for each sequence.
        cache_hits: tokens among them that it had.
        prefix_cache: finds blocks by their tokens; None: nothing is shared.
    """

    def __init__(self, limits: TermLimits, before: "SequenceTable | None" = None) -> None:
        """`before`: table of the last term, with equal limits, if the executor still has its blocks: what step outputs
        have confirmed there is found in the prefix cache. That table must not be used any more."""
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.groups = BlockGroups(limits.windows, limits.block_size)
        self.by_id: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.prefills = PrefillQueue()
        self.pending_frees = PendingFrees()
        self.needs_blocks: dict[int, Sequence] = {}
        self.cache_queries = 0
        self.cache_hits = 0
        self.prefix_cache = PrefixCache(self.pool, self.groups, limits.block_size) if limits.prefix_cache else None
        if before is not None:
            before.end_term()
            self.pool, self.prefix_cache = before.pool, before.prefix_cache
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        """Slots that can be given away now."""
        return min(len(self._free_slots), self.limits.max_running - len(self.running))

    def match_prefix(self, sequence: Sequence) -> CachedPrefix | None:
        """Calls `PrefixCache.match_prefix`; returns an empty prefix where none is cached or all must be computed."""
        if self.prefix_cache is None or sequence.reports_prompt:
            return CachedPrefix([], [], self.groups.first_seen(0))
        return self.prefix_cache.match_prefix(sequence)

    def add(self, sequence: Sequence) -> None:
        """Lets a new sequence wait for a slot."""
        self.by_id[sequence.id] = sequence
        self.waiting.add(sequence)

    def has_room(self, sequence: Sequence, prefix: CachedPrefix, spare: int) -> bool:
        """Returns whether a waiting sequence with this prefix can be given blocks, so that `spare` ones stay free."""
        used = self.pool.count_free(self.groups.all_of(prefix.blocks))
        used += len(self.groups.seen_of(prefix.blocks, prefix.given_back))
        return used + self._rest(sequence, prefix.blocks, prefix.given_back) <= self.pool.num_free - spare

    def allocate(self, sequence: Sequence, prefix: CachedPrefix, num_steps: int) -> None:
        """Gives a waiting sequence a slot and the blocks of its prefix, and reserves the others. There is room."""
        self.share(prefix.blocks, prefix.given_back)
        self._reserve(sequence, self._rest(sequence, prefix.blocks, prefix.given_back))
        sequence.blocks, sequence.stamps, sequence.given_back = prefix
        sequence.num_computed_tokens = len(prefix.blocks) // self.groups.count * self.limits.block_size
        self.waiting.pop(sequence)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if self.prefix_cache is not None:
                self.cache_queries += len(sequence.tokens)
                self.cache_hits += sequence.num_computed_tokens
            self.waiting.charge(sequence.user, len(sequence.tokens) - sequence.num_computed_tokens)
        self.assign_slot(sequence, num_steps)
        self.prefills[sequence.id] = sequence

    def assign_slot(self, sequence: Sequence, num_steps: int) -> None:
        """Gives a slot to a sequence that is in no queue and has its blocks, the full ones shared with others."""
        sequence.slot = self._free_slots.pop()
        sequence.state = SequenceState.RUNNING
        sequence.last_step = num_steps
        self.update_blocks_last_until(sequence)
        insort(self.running, sequence, key=rank)
        if self.prefix_cache is not None:
            self.prefix_cache.begin(sequence)

    def share(self, blocks: list[int], given_back: list[int]) -> None:
        """Adds references to the blocks of a table that are held."""
        self.pool.share(self.groups.all_of(blocks))
        self.pool.share(self.groups.seen_of(blocks, given_back), apart=True)

    def count_freeable(self, sequence: Sequence) -> int:
        """Returns how many blocks others could have if the sequence held none."""
        unshared = self.pool.count_unshared(self.groups.all_of(sequence.blocks))
        return unshared + len(self.groups.seen_of(sequence.blocks, sequence.given_back)) + sequence.num_reserved_blocks

    def allocate_blocks(self, sequence: Sequence) -> list[int]:
        """Gives a running sequence blocks for the steps ahead while there are any; returns the new ones."""
        if self.groups.windows:
            self.give_back(sequence)
        missing = self.limits.missing_blocks(sequence, self.limits.ahead(sequence))
        blocks = self.extend(sequence, min(missing, self.pool.num_free) // self.groups.count)
        if len(blocks) == missing:
            del self.needs_blocks[sequence.id]
            self.update_blocks_last_until(sequence)
        return blocks

    def extend_prompt(self, sequence: Sequence, positions: int) -> list[int]:
        """Gives a prompt in progress the reserved blocks that its next `positions` positions need.

        A prompt whose last token they may reach gets all blocks, because it decodes then. Returns the new ones.
        """
        self.give_back(sequence)
        self._reserve(sequence, 0)
        held = len(sequence.blocks) // self.groups.count
        count = self.limits.entries_for(sequence.num_computed_tokens + positions) - held
        if (held + count) * self.limits.block_size >= len(sequence.tokens):
            count = self.limits.missing_blocks(sequence, self.limits.ahead(sequence)) // self.groups.count
        for (_, window), first in zip(self.groups.windows, sequence.given_back, strict=True):
            count = min(count, self.limits.entries_of(window) - held + first)
        blocks = self.extend(sequence, count) if count > 0 else []
        self._reserve(sequence, self._rest(sequence, sequence.blocks, sequence.given_back))
        if not sequence.num_reserved_blocks:
            self.update_blocks_last_until(sequence)
        return blocks

    def give_back(self, sequence: Sequence) -> None:
        """Frees the blocks that the windows of a sequence have left behind: no step reads them any more."""
        first = self.groups.first_seen(sequence.num_computed_tokens)
        if first != sequence.given_back:
            self.pool.free(self.groups.seen_of(sequence.blocks, sequence.given_back, first), apart=True)
            sequence.given_back = first

    def extend(self, sequence: Sequence, entries: int) -> list[int]:
        """Appends new entries to the block table of a sequence; returns their blocks."""
        blocks = self.pool.allocate(entries * self.groups.count)
        sequence.blocks += blocks
        sequence.stamps += [self.pool.clock] * len(blocks)
        return blocks

    def _rest(self, sequence: Sequence, blocks: list[int], given_back: list[int]) -> int:
        """Returns how many blocks the prompt of a sequence takes at most at a time, beside `blocks`, which it holds."""
        positions = min(len(sequence.tokens) - 1 + self.limits.ahead(sequence), sequence.last_position)
        entries = len(blocks) // self.groups.count
        return self.limits.blocks_for(self.limits.entries_for(positions) - entries, [entries - i for i in given_back])

    def _reserve(self, sequence: Sequence, count: int) -> None:
        """Sets how many blocks are reserved for a sequence."""
        self.pool.reserved += count - sequence.num_reserved_blocks
        sequence.num_reserved_blocks = count

    def update_blocks_last_until(self, sequence: Sequence) -> None:
        """Sets how long the blocks of the sequence last, so that reading a step costs one comparison."""
        held = len(sequence.blocks) // self.groups.count * self.limits.block_size
        sequence.blocks_last_until = NEVER if held >= sequence.last_position else held - self.limits.ahead(sequence) + 1

    def preempt(self, sequence: Sequence) -> None:
        """Takes the slot of a running sequence to make room."""
        self._stop(sequence)
        sequence.state = SequenceState.PREEMPTED
        self.pending_frees.add(sequence)

    def abort(self, sequence_id: int) -> bool:
        """Ends a sequence that the executor may be running; returns whether there was one."""
        sequence = self.by_id.pop(sequence_id, None)
        if sequence is None:
            return False
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            sequence.state = SequenceState.FINISHED
            return True
        if sequence.state is SequenceState.RUNNING:
            self._stop(sequence)
            self.pending_frees.add(sequence)
        sequence.state = SequenceState.ABORTED
        return True

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence that no step writes to any more. The next plan empties its slot and may give it away."""
        if sequence.state is not SequenceState.RUNNING:
            self.abort(sequence.id)  # its slot was taken by a plan that is not answered yet
            return
        del self.by_id[sequence.id]
        self._stop(sequence)
        self.pending_frees.removed_slots.append(sequence.slot)
        self.free(sequence)

    def free_answered(self, plan: int) -> None:
        """Frees what the plans up to `plan` took from live sequences. Preempted sequences wait again."""
        for sequence in self.pending_frees.pop_answered(plan):
            preempted = sequence.state is SequenceState.PREEMPTED
            self.free(sequence)
            if preempted and sequence.at_limit:
                del self.by_id[sequence.id]
            elif preempted:
                sequence.state = SequenceState.WAITING
                sequence.blocks, sequence.stamps, sequence.given_back = [], [], []
                sequence.num_computed_tokens = 0
                if sequence.position_limit:
                    self.waiting.prepend(sequence)
                else:
                    self.waiting.add(sequence)

    def free(self, sequence: Sequence) -> None:
        """Frees slot and blocks of a sequence that the executor no longer touches."""
        if self.prefix_cache is not None:
            self.prefix_cache.end(sequence)
        self.pool.free(self.groups.all_of(sequence.blocks))
        self.pool.free(self.groups.seen_of(sequence.blocks, sequence.given_back), apart=True)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.state = SequenceState.FINISHED

    def end_term(self) -> None:
        """Frees the blocks of all sequences. No step writes to them any more."""
        for sequence in (*self.running, *self.pending_frees):
            self._reserve(sequence, 0)
            self.free(sequence)
        if self.prefix_cache is not None:
            self.prefix_cache.end_term()

    def check(self) -> None:
        """Checks the invariants that hold between any two calls.

        Raises:
            IntegrityError: a block or a slot is lost or has two owners, or a sequence is in a wrong place.
        """
        pending, waiting = list(self.pending_frees), list(self.waiting)
        holders = [*self.running, *pending]
        apart = [self.groups.seen_of(s.blocks, s.given_back) for s in holders]
        self.pool.check([*(self.groups.all_of(s.blocks) for s in holders), *apart])
        shared = sum(map(len, apart)) - len(set().union(*apart))
        if sorted([s.slot for s in holders] + self._free_slots) != list(range(self.limits.max_num_seqs)):
            raise IntegrityError("a slot is lost or has two owners")
        front = len(self.waiting.front)
        if any(queue != sorted(queue, key=rank) for queue in (self.running, waiting[:front], waiting[front:])):
            raise IntegrityError("the order is lost")
        if self.pool.reserved - shared != sum(s.num_reserved_blocks for s in holders) or self.pool.num_free < 0:
            raise IntegrityError("blocks are reserved for nobody, or for too many")
        if any(s.num_reserved_blocks for s in (*holders, *waiting) if s.id not in self.prefills):
            raise IntegrityError("a sequence decodes without the blocks that were reserved for it")
        if any(s.state is not SequenceState.RUNNING for s in self.running) or any(s.blocks for s in waiting):
            raise IntegrityError("a sequence is where it should not be")
        if {id(s) for s in self.by_id.values()} - {id(s) for s in (*holders, *waiting)}:
            raise IntegrityError("a sequence is nowhere")
        if self.prefix_cache is not None and self.prefix_cache.open.keys() != {s.id for s in holders}:
            raise IntegrityError("the prefix cache waits for a sequence that does not run")

    def _stop(self, sequence: Sequence) -> None:
        """Takes a sequence out of `running`."""
        self.running.remove(sequence)
        self.needs_blocks.pop(sequence.id, None)
        self._reserve(sequence, 0)
        if self.prefills.pop(sequence.id, None) is not None and self.prefix_cache is not None:
            self.prefix_cache.cancel_prefill(sequence)
