"""The prefix cache: which blocks a new sequence can share, and which it should wait for.

What a sequence computes behind the blocks that it shares is one run. Runs are found by their first block, and from
there on compared token by token, so two prefixes are never mistaken for each other, and a sequence that meets no equal
costs one look-up and one entry, however long it is. Together the runs are a radix tree, as in SGLang's RadixAttention
(Zheng et al., 2024), whose nodes need not be split.
"""

from dataclasses import dataclass

from pagewire.services.scheduler.blocks import BlockPool
from pagewire.services.scheduler.sequence import Sequence

_Key = tuple[int, int | str, tuple[int, ...]]
"""Where a run begins: the block before it, when that was allocated, and the tokens of its own first block.

A run without a block before it has the salt of its request in the place of the time. Those that follow it inherit that,
for they name a block that only its sharers know.
"""
_ROOT = -1


@dataclass(slots=True, eq=False)
class _Run:
    sequence: Sequence | None
    """Who computes it and holds its blocks; None: nobody any more."""
    tokens: list[int]
    """Of its sequence."""
    blocks: list[int]
    """Of its sequence."""
    first: int
    """Where its own blocks begin."""
    promised: int
    """Where those end that its prompt is about to fill."""
    entered: bool = False
    """Whether it can be found, or an equal one."""
    full: int = 0
    """Where those begin that were not full when its sequence ended."""
    clock: int = 0
    """Of the pool, at that time."""


class Prefixes:
    """Shares the confirmed blocks of a pool, as long as nobody has been given them for something else."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._size = block_size
        self._runs: dict[_Key, _Run] = {}
        self._open: dict[int, _Run] = {}  # by sequence, until it gives its blocks back
        self._sought: tuple[int, int, _Key] = (-1, 0, (_ROOT, "", ()))  # sequence, blocks before it, and the last key

    def known(self, sequence: Sequence) -> list[int] | None:
        """Confirmed blocks of the sequence's prefix; None while a running prompt is about to confirm more of it.

        At least one token is left to compute: somebody must sample.
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

    def begin(self, sequence: Sequence, shared: list[int]) -> None:
        """It runs from here on, behind the blocks that it shares."""
        first = len(shared)
        run = _Run(sequence, sequence.tokens, sequence.blocks, first, (len(sequence.tokens) - 1) // self._size)
        self._open[sequence.id] = run
        if run.promised > first:
            sought, before, key = self._sought
            just_sought = sought == sequence.id and before == first
            self._enter(key if just_sought else self._key(sequence, shared), run)

    def withdraw(self, sequence: Sequence) -> None:
        """It runs no more: whoever waits for its prompt computes that itself."""
        self._open[sequence.id].promised = 0

    def end(self, sequence: Sequence) -> None:
        """It is about to give its blocks back. Those that it has filled, also with what it generated, stay known."""
        run = self._open.pop(sequence.id)
        run.full = sequence.computed // self._size
        run.clock = self._pool.clock
        run.sequence = None
        run.promised = 0
        if run.full > run.first and not run.entered:
            self._enter(self._key(sequence, sequence.blocks[: run.first]), run)

    def open(self) -> set[int]:
        """Ids of the sequences that have begun and not ended."""
        return set(self._open)

    def _enter(self, key: _Key, run: _Run) -> None:
        run.entered = True
        other = self._runs.setdefault(key, run)
        if other is not run and not self._lives(other):
            self._runs[key] = run
        if len(self._runs) > 2 * self._pool.num_blocks:  # of those that live, each has a block of its own
            self._runs = {key: run for key, run in self._runs.items() if self._lives(run)}

    def _lives(self, run: _Run) -> bool:
        return run.promised > run.first or (self._full(run) > run.first and self._holds(run, run.first))

    def _full(self, run: _Run) -> int:
        return run.full if run.sequence is None else run.sequence.computed // self._size

    def _holds(self, run: _Run, i: int) -> bool:
        return run.sequence is not None or self._pool.allocated_at(run.blocks[i]) <= run.clock

    def _key(self, sequence: Sequence, before: list[int]) -> _Key:
        i = len(before) * self._size
        tokens = tuple(sequence.tokens[i : i + self._size])
        key: _Key
        if before:
            key = before[-1], self._pool.allocated_at(before[-1]), tokens
        else:
            key = _ROOT, sequence.cache_salt, tokens
        self._sought = sequence.id, len(before), key
        return key

    def _equal(self, run: _Run, sequence: Sequence, i: int) -> bool:
        part = slice(i * self._size, (i + 1) * self._size)
        return run.tokens[part] == sequence.tokens[part]
