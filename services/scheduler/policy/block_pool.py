"""The pool of KV blocks, with reference counts.

A block is used (one reference per sequence that reads it) or free. A free block keeps its content until it is allocated
again. The block that has been free longest is allocated first, so a prefix that is used again and again stays.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class IntegrityError(Exception):
    """Blocks or slots are not counted as they should be: a fault in the scheduler."""


class BlockPool:
    """Reference counts of `num_blocks` blocks.

    Attributes:
        reserved: number of free blocks that are kept for holders, which lower it before they allocate them. Reserved
            blocks keep their content until then.
        clock: calls of `allocate` so far. A block that was allocated later has lost its content of that time.
        allocated_at: clock of each block's last allocation.
        num_shared: blocks with more than one reference.
        num_blank: blocks that have never been allocated, and so hold nothing.

    >>> pool = BlockPool(8)
    >>> blocks = pool.allocate(3)
    >>> pool.share(blocks[:2])  # another sequence has the same prefix
    >>> pool.free(blocks)
    >>> pool.num_used, pool.num_free
    (2, 6)
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reserved = 0
        self.clock = 0
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._references = [0] * num_blocks
        self.allocated_at = [0] * num_blocks
        self.num_shared = 0
        self.num_blank = num_blocks

    @property
    def num_free(self) -> int:
        """Free blocks that are not reserved."""
        return len(self._free) - self.reserved

    @property
    def num_used(self) -> int:
        """Blocks with a reference; a shared one counts once."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks of undefined content, with one reference each. The caller has checked `num_free`."""
        self.clock += 1
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self.num_blank -= not self.allocated_at[block]
            self.allocated_at[block] = self.clock
        return blocks

    def count_free(self, blocks: Iterable[int]) -> int:
        """Returns how many of `blocks` are free."""
        return sum(block in self._free for block in blocks)

    def count_unshared(self, blocks: Iterable[int]) -> int:
        """Returns how many of `blocks` would become free if their holder freed them."""
        return sum(self._references[block] == 1 for block in blocks)

    def share(self, blocks: Iterable[int], *, apart: bool = False) -> None:
        """Adds a reference to each block, used or free.

        `apart`: another free block is reserved for each used one, and kept until `free` with `apart` takes a reference
        from it. So a holder that frees the block can always allocate one, though others still hold it.
        """
        for block in blocks:
            if apart and self._references[block]:
                self.reserved += 1
            self._references[block] += 1
            self.num_shared += self._references[block] == 2
            self._free.pop(block, None)

    def free(self, blocks: Sequence[int], *, apart: bool = False) -> None:
        """Takes one reference from each block of a sequence. The last block is the first to be allocated again.

        Raises:
            IntegrityError: a block has no reference.
        """
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise IntegrityError(f"block {block} is freed twice")
            self._references[block] -= 1
            self.num_shared -= self._references[block] == 1
            if self._references[block] == 0:
                self._free[block] = None
            elif apart:
                self.reserved -= 1

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Compares the reference counts with the block tables of all holders.

        Raises:
            IntegrityError: a block is lost, counted wrongly, or both free and used.
        """
        counted = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        if counted != self._references:
            wrong = [b for b in range(self.num_blocks) if counted[b] != self._references[b]]
            raise IntegrityError(f"blocks {wrong[:8]} are counted wrongly")
        if self._free.keys() != {block for block in range(self.num_blocks) if not counted[block]}:
            raise IntegrityError("a block is both free and used, or lost")
