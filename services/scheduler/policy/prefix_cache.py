"""The prefix cache: which blocks a new sequence can share, and which it should wait for.

The blocks that a sequence computes behind those that it shares are one run. A run is found by its first block, and from
there on compared token by token, so two prefixes are never mistaken for each other, and a sequence that matches nothing
costs one look-up and one entry, however long it is. Together the runs are a radix tree, as in SGLang's RadixAttention
(Zheng et al., 2024), whose nodes need not be split.

Layers that see all positions need every block of a prefix, and layers with a window only the last ones. So a prefix is
followed as far as the first are there, and cut back to where the others are there too.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pagewire.services.scheduler.policy.block_groups import BlockGroups
from pagewire.services.scheduler.policy.block_pool import BlockPool
from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.shared.messages.step import Finish

_Key = tuple[int, int | str, tuple[int, ...]]
"""Beginning of a run: the entry before it, by its first block and when that was allocated, and the tokens of its own
first entry.

A run without an entry before it has the salt of its request in the place of the time. The runs that follow it inherit
the salt, for they name a block that only sequences of that salt share.
"""
_ROOT = -1
_NO_KEY: tuple[int, int, _Key] = (-1, 0, (_ROOT, "", ()))
"""Sequence, entries before the key, key."""
MIN_RUNS = 8
"""Runs that are kept at least, useful or not."""


class CachedPrefix(NamedTuple):
    """The confirmed part of a block table that begins with a sequence's tokens, in the fields of `Sequence`."""

    blocks: list[int]
    stamps: list[int]
    given_back: list[int]


@dataclass(slots=True, eq=False)
class _Run:
    sequence: Sequence | None  # computes the run and holds its blocks; None: it has freed them
    tokens: list[int]  # tokens of the sequence, as are the next two
    blocks: list[int]
    stamps: list[int]
    first: int  # index of the run's first entry
    promised: int  # index behind the last entry that the prompt of the sequence is about to fill
    entered: bool = False  # whether the run, or an equal one, can be found by its key
    full: int = 0  # index of the first entry that was not full when the sequence freed its blocks


class PrefixCache:
    """Finds confirmed blocks of a pool by their tokens, until the blocks are allocated for something else.

    >>> from pagewire.shared.messages.work import Sampling
    >>> pool, groups = BlockPool(8), BlockGroups(windows=(0,), block_size=2)
    >>> cache = PrefixCache(pool, groups, block_size=2)
    >>> first, second = (Sequence(i, [5, 6, 7, 8, i], 5, Sampling(16)) for i in (1, 2))
    >>> first.blocks, first.stamps = pool.allocate(3), [pool.clock] * 3
    >>> cache.begin(first)
    >>> cache.match_prefix(second) is None  # `first` is about to compute the same blocks: wait for them
    True
    >>> first.num_computed_tokens = 5
    >>> cache.match_prefix(second).blocks
    [0, 1]
    """

    def __init__(self, pool: BlockPool, groups: BlockGroups, block_size: int) -> None:
        self._pool = pool
        self._groups = groups
        self._count = groups.count
        self._size = block_size
        self._runs: dict[_Key, _Run] = {}
        self._limit = MIN_RUNS  # number of runs beyond which useless ones are forgotten
        self.open: dict[int, _Run] = {}  # by sequence, until it frees its blocks
        self._last_key = _NO_KEY

    def match_prefix(self, sequence: Sequence) -> CachedPrefix | None:
        """Returns the confirmed blocks of the sequence's prefix; None while a running prompt will soon confirm more.

        At least one token is left to compute, because the sequence needs logits to sample from.
        """
        blocks: list[int] = []
        stamps: list[int] = []
        i, end, count = 0, (len(sequence.tokens) - 1) // self._size, self._count
        while i < end:
            run = self._runs.get(self._key(sequence, i, blocks, stamps))
            if run is None:
                break
            full, begin = self._full(run), i
            while i < min(full, end) and self._equal(run, sequence, i) and self._holds(run, i):
                i += 1
            if i > begin:
                blocks += run.blocks[begin * count : i * count]
                stamps += run.stamps[begin * count : i * count]
            if full <= i < min(run.promised, end) and self._equal(run, sequence, i):
                return None
            if i == run.first:
                break
        return self._cut_back(blocks, stamps) if self._groups.windows else CachedPrefix(blocks, stamps, [])

    def _cut_back(self, blocks: list[int], stamps: list[int]) -> CachedPrefix:
        """Returns as much of a prefix as the layers with a window can go on behind."""
        groups, count = self._groups, self._count
        end, entries, given_back = 0, len(blocks) // count, groups.first_seen(0)
        lost = [0] * len(groups.windows)  # index behind the last entry whose block is lost
        for i in range(entries):
            for place, (group, _) in enumerate(groups.windows):
                at = i * count + group
                if self._pool.allocated_at[blocks[at]] != stamps[at]:
                    lost[place] = i + 1
            first = groups.first_seen((i + 1) * self._size)
            if all(a <= b for a, b in zip(lost, first, strict=True)):
                end, given_back = i + 1, first
        return CachedPrefix(blocks[: end * count], stamps[: end * count], given_back)

    def begin(self, sequence: Sequence) -> None:
        """Begins the run of a sequence that has its blocks, behind the full ones, which it shares."""
        first, promised = sequence.num_computed_tokens // self._size, (len(sequence.tokens) - 1) // self._size
        run = _Run(sequence, sequence.tokens, sequence.blocks, sequence.stamps, first, promised)
        self.open[sequence.id] = run
        if run.promised > first:
            last, before, key = self._last_key
            just_matched = last == sequence.id and before == first
            self._enter(key if just_matched else self._key(sequence, first, run.blocks, run.stamps), run)

    def cancel_prefill(self, sequence: Sequence) -> None:
        """Records that the prompt will not be computed to its end, so that no other sequence waits for it."""
        self.open[sequence.id].promised = 0

    def end(self, sequence: Sequence) -> None:
        """Ends the run of a sequence that is about to free its blocks. Its full blocks can still be found.

        The blocks of a sequence whose logits were not finite cannot: KV that overflows may reach the positions before
        it that were computed in the same tile.
        """
        run = self.open.pop(sequence.id)
        run.full = 0 if sequence.finish is Finish.NOT_FINITE else sequence.num_computed_tokens // self._size
        run.sequence = None
        run.promised = 0
        if run.full > run.first and not run.entered:
            self._enter(self._key(sequence, run.first, run.blocks, run.stamps), run)

    def end_term(self) -> None:
        """Forgets which sequence was looked for last: another one may have its id in the next term."""
        self._last_key = _NO_KEY

    def _enter(self, key: _Key, run: _Run) -> None:
        run.entered = True
        other = self._runs.setdefault(key, run)
        if other is not run and not self._is_useful(other):
            self._runs[key] = run
        if len(self._runs) > self._limit:  # runs keep the tokens of their sequences
            self._runs = {key: run for key, run in self._runs.items() if self._is_useful(run)}
            self._limit = max(MIN_RUNS, 2 * len(self._runs))

    def _is_useful(self, run: _Run) -> bool:
        full = self._full(run)
        if full <= run.first:
            return run.promised > run.first
        # The first entry is lost last, unless windows leave it behind.
        at = (run.first if self._groups.unbounded else full - 1) * self._count
        return run.promised > run.first or self._pool.allocated_at[run.blocks[at]] == run.stamps[at]

    def _full(self, run: _Run) -> int:
        return run.full if run.sequence is None else run.sequence.num_computed_tokens // self._size

    def _holds(self, run: _Run, i: int) -> bool:
        """Returns whether the blocks of an entry are still what they were, but for those of layers with a window."""
        for group in self._groups.unbounded:
            at = i * self._count + group
            if self._pool.allocated_at[run.blocks[at]] != run.stamps[at]:
                return False
        return True

    def _key(self, sequence: Sequence, entries: int, blocks: list[int], stamps: list[int]) -> _Key:
        """Returns the key of the run behind so many entries of a table."""
        i = entries * self._size
        tokens = tuple(sequence.tokens[i : i + self._size])
        key: _Key
        if entries:
            before = (entries - 1) * self._count
            key = blocks[before], stamps[before], tokens
        else:
            key = _ROOT, sequence.cache_salt, tokens
        self._last_key = sequence.id, entries, key
        return key

    def _equal(self, run: _Run, sequence: Sequence, i: int) -> bool:
        part = slice(i * self._size, (i + 1) * self._size)
        return run.tokens[part] == sequence.tokens[part]
