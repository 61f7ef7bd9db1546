"""How many KV blocks a sequence holds, where layers in groups of equal size share a pool of blocks."""

from collections.abc import Iterable, Sequence
from itertools import repeat

LOOKAHEAD_STEPS = 3
"""Steps behind the last one reported for which a sequence is given blocks, however long the lease is: two that are in
flight, and the one that is composed next. Blocks that are given earlier lie empty."""


def entries_of_window(window: int, ahead: int, block_size: int) -> int:
    """Returns how many entries of a block table a group of layers with this window holds at most.

    These are the positions that it sees, and the `ahead` positions that the next steps can fill. The bounds of blocks
    add two entries, and the tokens sampled meanwhile one.
    """
    return -(-(window + ahead) // block_size) + 3


def blocks_of(entries: int, windows: Sequence[int], ahead: int, block_size: int, held: Iterable[int] = ()) -> int:
    """Returns how many more blocks a sequence takes at most at a time for so many more entries of its block table.

    Args:
        entries: number of entries.
        windows: per group of layers, how many positions a query sees, its own included; 0: all.
        ahead: positions that the next steps can fill.
        block_size: positions of a block.
        held: number of entries that each group with a window holds already; empty: none.
    """
    own = iter(held or repeat(0))
    return sum(
        min(entries, entries_of_window(window, ahead, block_size) - next(own)) if window else entries
        for window in windows
    )
