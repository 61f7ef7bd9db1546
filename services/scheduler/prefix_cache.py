"""The prefix cache: which blocks a new sequence can share, and which it should wait for.

The blocks that a sequence computes behind those that it shares are one run. A run is found by its first block, and from
there on compared token by token, so two prefixes are never mistaken for each other, and a sequence that matches nothing
costs one look-up and one entry, however long it is. Together the runs are a radix tree, as in SGLang's RadixAttention
(Zheng et al., 2024), whose nodes need not be split.
"""

from dataclasses import dataclass

from pagewire.services.scheduler.block_pool import BlockPool
from pagewire.services.scheduler.sequence import Sequence

_Key = tuple[int, int | str, tuple[int, ...]]
"""Where a run begins: the block before it, when that block was allocated, and the tokens of its own first block.

A run without a block before it has the salt of its request in the place of the time. The runs that follow it inherit
the salt, for they name a block that only sequences of that salt share.
"""
_ROOT = -1
MIN_RUNS = 8
"""Runs that are kept at least, useful or not."""


@dataclass(slots=True, eq=False)
class _Run:
    sequence: Sequence | None  # computes the run and holds its blocks; None: it has freed them
    tokens: list[int]  # of the sequence
    blocks: list[int]  # of the sequence
    first: int  # index of the run's first block
    promised: int  # index behind the last block that the prompt of the sequence is about to fill
    entered: bool = False  # whether the run, or an equal one, can be found by its key
    full: int = 0  # index of the first block that was not full when the sequence freed its blocks
    clock: int = 0  # of the pool at that time


class PrefixCache:
    """Finds confirmed blocks of a pool by their tokens, until the blocks are allocated for something else."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._size = block_size
        self._runs: dict[_Key, _Run] = {}
        self._limit = MIN_RUNS  # number of runs beyond which useless ones are forgotten
        self.open: dict[int, _Run] = {}  # by sequence, until it frees its blocks
        self._last_key: tuple[int, int, _Key] = (-1, 0, (_ROOT, "", ()))  # sequence, blocks before the key, key

    def match_prefix(self, sequence: Sequence) -> list[int] | None:
        """Returns the confirmed blocks of the sequence's prefix; None while a running prompt will soon confirm more.

        At least one token is left to compute, because the sequence needs logits to sample from.
        """
        found: list[int] = []
        end = (len(sequence.tokens) - 1) // self._size
        while (i := len(found)) < end:
            run = self._runs.get(self._key(sequence, found))
            if run is None:
                break
            full = self._full(run)
            while i < min(full, end) and self._equal(run, sequence, i) and self._holds(run, i):
                found.append(run.blocks[i])
                i += 1
            if full <= i < min(run.promised, end) and self._equal(run, sequence, i):
                return None
            if i == run.first:
                break
        return found

    def begin(self, sequence: Sequence) -> None:
        """Begins the run of a sequence that has its blocks, behind the full ones, which it shares."""
        first = sequence.num_computed_tokens // self._size
        run = _Run(sequence, sequence.tokens, sequence.blocks, first, (len(sequence.tokens) - 1) // self._size)
        self.open[sequence.id] = run
        if run.promised > first:
            last, before, key = self._last_key
            just_matched = last == sequence.id and before == first
            self._enter(key if just_matched else self._key(sequence, sequence.blocks[:first]), run)

    def cancel_prefill(self, sequence: Sequence) -> None:
        """Records that the prompt will not be computed to its end, so that no other sequence waits for it."""
        self.open[sequence.id].promised = 0

    def end(self, sequence: Sequence) -> None:
        """Ends the run of a sequence that is about to free its blocks. Its full blocks can still be found."""
        run = self.open.pop(sequence.id)
        run.full = sequence.num_computed_tokens // self._size
        run.clock = self._pool.clock
        run.sequence = None
        run.promised = 0
        if run.full > run.first and not run.entered:
            self._enter(self._key(sequence, sequence.blocks[: run.first]), run)

    def _enter(self, key: _Key, run: _Run) -> None:
        run.entered = True
        other = self._runs.setdefault(key, run)
        if other is not run and not self._is_useful(other):
            self._runs[key] = run
        if len(self._runs) > self._limit:  # runs keep the tokens of their sequences
            self._runs = {key: run for key, run in self._runs.items() if self._is_useful(run)}
            self._limit = max(MIN_RUNS, 2 * len(self._runs))

    def _is_useful(self, run: _Run) -> bool:
        return run.promised > run.first or (self._full(run) > run.first and self._holds(run, run.first))

    def _full(self, run: _Run) -> int:
        return run.full if run.sequence is None else run.sequence.num_computed_tokens // self._size

    def _holds(self, run: _Run, i: int) -> bool:
        return run.sequence is not None or self._pool.allocated_at[run.blocks[i]] <= run.clock

    def _key(self, sequence: Sequence, before: list[int]) -> _Key:
        i = len(before) * self._size
        tokens = tuple(sequence.tokens[i : i + self._size])
        key: _Key
        if before:
            key = before[-1], self._pool.allocated_at[before[-1]], tokens
        else:
            key = _ROOT, sequence.cache_salt, tokens
        self._last_key = sequence.id, len(before), key
        return key

    def _equal(self, run: _Run, sequence: Sequence, i: int) -> bool:
        part = slice(i * self._size, (i + 1) * self._size)
        return run.tokens[part] == sequence.tokens[part]
