"""The sequences of one term with their slots and blocks, and the transitions between their states."""

from bisect import insort

from pagewire.services.scheduler.block_pool import BlockPool, IntegrityError
from pagewire.services.scheduler.limits import Limits
from pagewire.services.scheduler.pending_frees import PendingFrees
from pagewire.services.scheduler.prefill_queue import PrefillQueue
from pagewire.services.scheduler.prefix_cache import PrefixCache
from pagewire.services.scheduler.sequence import Sequence, SequenceState
from pagewire.services.scheduler.waiting_queue import WaitingQueue, rank

NEVER = 1 << 62
"""A number of tokens that no sequence reaches."""


class SequenceTable:
    """Who holds what. `SequenceState` draws the transitions.

    Attributes:
        by_id: sequences that have not ended.
        running: in order of rank.
        needs_blocks: running sequences whose blocks do not last for the steps ahead, by id.
        cache_queries: tokens so far that were looked for in the prefix cache, once for each sequence.
        cache_hits: those of them that it had.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.by_id: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.prefills = PrefillQueue()
        self.pending_frees = PendingFrees()
        self.needs_blocks: dict[int, Sequence] = {}
        self.cache_queries = 0
        self.cache_hits = 0
        self._prefix_cache = PrefixCache(self.pool, limits.block_size) if limits.prefix_cache else None
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        """Slots that can be given away now."""
        return min(len(self._free_slots), self.limits.max_running - len(self.running))

    def match_prefix(self, sequence: Sequence) -> list[int] | None:
        """See `PrefixCache.match_prefix`; empty where prefixes are not cached or must be computed."""
        if self._prefix_cache is None or sequence.reports_prompt:
            return []
        return self._prefix_cache.match_prefix(sequence)

    def add(self, sequence: Sequence) -> None:
        """Lets a new sequence wait for a slot."""
        self.by_id[sequence.id] = sequence
        self.waiting.add(sequence)

    def allocate(self, sequence: Sequence, shared: list[int], count: int, num_steps: int) -> None:
        """Gives a waiting sequence a slot and the blocks `shared` of its prefix, and reserves `count` new ones."""
        self.pool.share(shared)
        self.pool.reserve(count)
        sequence.blocks, sequence.num_reserved_blocks = shared, count
        sequence.num_computed_tokens = len(shared) * self.limits.block_size
        self.waiting.pop(sequence)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if self._prefix_cache is not None:
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
        self.update_allocate_at(sequence)
        insort(self.running, sequence, key=rank)
        if self._prefix_cache is not None:
            self._prefix_cache.begin(sequence)

    def allocate_blocks(self, sequence: Sequence) -> list[int]:
        """Gives a running sequence blocks for the steps ahead while there are any; returns the new ones."""
        missing = self.limits.missing_blocks(sequence, self.limits.lookahead)
        blocks = self.pool.allocate(min(missing, self.pool.num_free))
        sequence.blocks += blocks
        if len(blocks) == missing:
            del self.needs_blocks[sequence.id]
            self.update_allocate_at(sequence)
        return blocks

    def extend_prompt(self, sequence: Sequence, positions: int) -> list[int]:
        """Gives a prompt in progress those of its reserved blocks that its next `positions` positions need.

        A prompt whose last token they may reach gets all of them, because it decodes then. Returns the new ones.
        """
        held = len(sequence.blocks)
        count = self.limits.blocks_for(sequence.num_computed_tokens + positions) - held
        if (held + count) * self.limits.block_size >= len(sequence.tokens):
            count = sequence.num_reserved_blocks
        if count <= 0:
            return []
        sequence.num_reserved_blocks -= count
        self.pool.unreserve(count)
        blocks = self.pool.allocate(count)
        sequence.blocks += blocks
        self.update_allocate_at(sequence)
        return blocks

    def update_allocate_at(self, sequence: Sequence) -> None:
        """Sets when the sequence needs more blocks, so that reading a step costs one comparison."""
        held = len(sequence.blocks) * self.limits.block_size
        sequence.allocate_at = NEVER if held >= sequence.last_position else held - self.limits.lookahead + 2

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
                sequence.blocks, sequence.num_computed_tokens = [], 0
                if sequence.position_limit:
                    self.waiting.prepend(sequence)
                else:
                    self.waiting.add(sequence)

    def free(self, sequence: Sequence) -> None:
        """Frees slot and blocks of a sequence that the executor no longer touches."""
        if self._prefix_cache is not None:
            self._prefix_cache.end(sequence)
        self.pool.free(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.state = SequenceState.FINISHED

    def check(self) -> None:
        """Checks the invariants that hold between any two calls.

        Raises:
            IntegrityError: a block or a slot is lost or has two owners, or a sequence is in a wrong place.
        """
        pending, waiting = list(self.pending_frees), list(self.waiting)
        holders = [*self.running, *pending]
        self.pool.check([s.blocks for s in holders])
        if sorted([s.slot for s in holders] + self._free_slots) != list(range(self.limits.max_num_seqs)):
            raise IntegrityError("a slot is lost or has two owners")
        front = len(self.waiting.front)
        if any(queue != sorted(queue, key=rank) for queue in (self.running, waiting[:front], waiting[front:])):
            raise IntegrityError("the order is lost")
        if self.pool.reserved != sum(s.num_reserved_blocks for s in self.prefills.values()) or self.pool.num_free < 0:
            raise IntegrityError("blocks are reserved for nobody, or for too many")
        if any(s.num_reserved_blocks for s in (*holders, *waiting) if s.id not in self.prefills):
            raise IntegrityError("a sequence decodes without the blocks that were reserved for it")
        if any(s.state is not SequenceState.RUNNING for s in self.running) or any(s.blocks for s in waiting):
            raise IntegrityError("a sequence is where it should not be")
        if {id(s) for s in self.by_id.values()} - {id(s) for s in (*holders, *waiting)}:
            raise IntegrityError("a sequence is nowhere")
        if self._prefix_cache is not None and self._prefix_cache.open.keys() != {s.id for s in holders}:
            raise IntegrityError("the prefix cache waits for a sequence that does not run")

    def _stop(self, sequence: Sequence) -> None:
        """Takes a sequence out of `running`."""
        self.running.remove(sequence)
        self.needs_blocks.pop(sequence.id, None)
        self.pool.unreserve(sequence.num_reserved_blocks)
        sequence.num_reserved_blocks = 0
        if self.prefills.pop(sequence.id, None) is not None and self._prefix_cache is not None:
            self._prefix_cache.cancel_prefill(sequence)
