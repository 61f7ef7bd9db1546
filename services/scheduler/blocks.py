"""The KV pool: who holds which block.

A block is held (one reference per sequence that reads it) or idle. Idle blocks keep their content until they are
allocated again, those that have been idle longest first, so a prefix that is used again and again stays.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class IntegrityError(Exception):
    """Blocks or slots are not counted as they should be: a fault in the scheduler."""


class BlockPool:
    """Reference counts of `num_blocks` blocks.

    Attributes:
        clock: calls of `allocate` so far. A block that was allocated later than a clock has lost what it held then.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.clock = 0
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._references = [0] * num_blocks
        self._allocated_at = [0] * num_blocks

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """Blocks that somebody references, shared ones once."""
        return self.num_blocks - self.available

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of undefined content, one reference each. The caller has checked `available`."""
        self.clock += 1
        blocks = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self._allocated_at[block] = self.clock
        return blocks

    def allocated_at(self, block: int) -> int:
        """The clock of its last allocation."""
        return self._allocated_at[block]

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` count as available at present."""
        return sum(block in self._idle for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block, held or idle."""
        for block in blocks:
            self._references[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference from each block of a sequence. The tail is the first to be allocated again."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise IntegrityError(f"block {block} is released twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._idle[block] = None

    def sole(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would become available if their holder released them."""
        return sum(self._references[block] == 1 for block in blocks)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Compares the counts with the block tables of all holders.

        Raises:
            IntegrityError: a block is lost, counted wrongly, or both idle and held.
        """
        counted = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        if counted != self._references:
            wrong = [b for b in range(self.num_blocks) if counted[b] != self._references[b]]
            raise IntegrityError(f"blocks {wrong[:8]} are counted wrongly")
        if any(counted[block] for block in self._idle):
            raise IntegrityError("a block is both idle and held")
        if len(self._idle) + sum(count > 0 for count in counted) != self.num_blocks:
            raise IntegrityError("a block is lost")
