"""The KV pool: who holds which block, and which blocks hold a known prefix.

A block is free, held (one reference per sequence that reads it), or evictable: nobody holds it, but it still holds a
known prefix and may be shared again until the space is needed. Source of the prefix cache: a hash chain over full
blocks, as in vLLM's automatic prefix caching.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from shared.messages import pack

ROOT = b""
"""Hash before the first block."""


class IntegrityError(Exception):
    """Blocks or slots are not counted as they should be: a fault in the scheduler."""


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block whose tokens are `tokens` and whose prefix hashes to `parent`: 16 bytes."""
    return blake2b(parent + pack(tokens), digest_size=16).digest()


class BlockPool:
    """Reference counts of `num_blocks` blocks and the index of confirmed prefixes among them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def held(self) -> int:
        """Blocks that somebody references, shared ones once."""
        return self.num_blocks - self.available

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of undefined content, one reference each; the least recently used prefixes go first.

        The caller has checked `available`.
        """
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                del self._by_hash[self._hash_of.pop(block)]
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix. They are not referenced yet: `share` them before `allocate`."""
        blocks = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def evictable(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` count as available at present."""
        return sum(block in self._evictable for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block."""
        for block in blocks:
            self._references[block] += 1
            self._evictable.pop(block, None)

    def publish(self, block: int, digest: bytes) -> None:
        """The block is confirmed to hold the prefix `digest`. If an equal one is known, that one stays known."""
        if digest not in self._by_hash and block not in self._hash_of:
            self._by_hash[digest] = block
            self._hash_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference from each block of a sequence. The tail becomes the first to be evicted."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise IntegrityError(f"block {block} is released twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def sole(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would become available if their holder released them."""
        return sum(self._references[block] == 1 for block in blocks)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Compares the counts with the block tables of all holders.

        Raises:
            IntegrityError: a block is lost, counted wrongly, or both free and held.
        """
        counted = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        if counted != self._references:
            wrong = [b for b in range(self.num_blocks) if counted[b] != self._references[b]]
            raise IntegrityError(f"blocks {wrong[:8]} are counted wrongly")
        idle = set(self._free) | self._evictable.keys()
        if len(idle) != self.available or any(counted[block] for block in idle):
            raise IntegrityError("a block is free twice, or free and held")
        if self.available + sum(count > 0 for count in counted) != self.num_blocks:
            raise IntegrityError("a block is lost")
