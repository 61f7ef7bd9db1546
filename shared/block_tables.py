"""How many KV blocks a sequence holds, where layers in groups of equal size share a pool of blocks."""

from collections.abc import Iterable, Sequence
from itertools import repeat

LOOKAHEAD_STEPS = 3
"""Number of steps after the last reported one for which a sequence gets blocks, however long the lease is: two steps in
flight, and the one that is composed next. Blocks for later steps would lie empty."""


def entries_of_window(window: int, ahead: int, block_size: int) -> int:
    """Returns the maximum number of entries that a group of layers with this window holds of a block table.

    The entries cover the positions that the group sees and the `ahead` positions that the next steps can fill. The
    bounds of blocks add two entries, and the tokens that are sampled meanwhile add one.

    >>> entries_of_window(window=512, ahead=16, block_size=16)
    36
    """
    return -(-(window + ahead) // block_size) + 3


def blocks_of(entries: int, windows: Sequence[int], ahead: int, block_size: int, held: Iterable[int] = ()) -> int:
    """Returns the maximum number of blocks that a sequence takes for further entries of its block table.

    Args:
        entries: number of further entries.
        windows: per group of layers, the positions that a query sees, its own included; 0: all.
        ahead: positions that the next steps can fill.
        block_size: positions per block.
        held: number of entries that each group with a window holds already; empty: none.

    >>> blocks_of(100, windows=[0], ahead=16, block_size=16)  # one group, which sees all positions
    100
    >>> blocks_of(100, windows=[0, 512], ahead=16, block_size=16)  # and one that sees the last 512
    136
    """
    held_entries = iter(held or repeat(0))
    return sum(
        min(entries, entries_of_window(window, ahead, block_size) - next(held_entries)) if window else entries
        for window in windows
    )
