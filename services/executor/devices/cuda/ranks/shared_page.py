"""A page of memory that all ranks share: their heartbeats, and checksums of what they have sampled."""

import mmap
import zlib

import numpy as np

from pagewire.services.executor.devices.cuda.device import DEPTH
from pagewire.services.executor.devices.protocol import Int64
from pagewire.services.executor.rank_processes import MAX_RANKS

KEPT = 4 * DEPTH
"""Latest steps whose checksums are kept: a rank is never so many steps ahead of another."""
PAGE = -(-MAX_RANKS * (1 + KEPT) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
"""Bytes of the memory."""


class SharedPage:
    """One rank's view of the page.

    Attributes:
        heartbeats: [ranks] the number of each rank's heartbeats, which grows as long as its process is not stopped.
    """

    def __init__(self, memory: int, rank: int, size: int) -> None:
        """`memory` is the descriptor of a file of `PAGE` bytes, zeros at first. There are `size` ranks."""
        self._rank, self._size = rank, size
        numbers = np.frombuffer(mmap.mmap(memory, PAGE), np.int64, MAX_RANKS * (1 + KEPT))
        self.heartbeats: Int64 = numbers[:MAX_RANKS]
        self._checksums: Int64 = numbers[MAX_RANKS:].reshape(MAX_RANKS, KEPT)
        self._steps = 0

    def note(self, tokens: Int64) -> None:
        """Notes the tokens [R] of this rank's next step."""
        self._checksums[self._rank, self._steps % KEPT] = zlib.crc32(tokens.tobytes())
        self._steps += 1

    def differing_rank(self) -> int | None:
        """Returns a rank whose tokens of a step differ from this one's: of the last step that all ranks have noted."""
        if self._steps <= DEPTH:
            return None
        # Ranks wait for each other in the last step, and before they launched it they have noted this one.
        checksums = self._checksums[: self._size, (self._steps - 1 - DEPTH) % KEPT]
        differing = np.flatnonzero(checksums != checksums[self._rank])
        return int(differing[0]) if len(differing) else None
