"""Copy-on-write: which blocks a beam gets that continues another one."""

from collections.abc import Iterable
from typing import NamedTuple

from pagewire.services.scheduler.block_pool import BlockPool
from pagewire.services.scheduler.sequence import Sequence


class Forked(NamedTuple):
    """A child that has its blocks."""

    child: Sequence
    source: int
    """Slot of its parent."""
    shared: int
    """Leading blocks that its parent has filled, so that no sequence writes to them any more."""


def fork_blocks(
    pool: BlockPool, block_size: int, pairs: Iterable[tuple[Sequence, Sequence]], max_forks: int
) -> tuple[list[Forked], list[int]]:
    """Gives blocks to at most `max_forks` children, while there are any.

    All children of a parent share its full blocks. If its last block is not full, the first child goes on in that
    block, and the other children get a copy of it. The parents keep their own references.

    Args:
        pool: the blocks.
        block_size: positions per block.
        pairs: each child with its parent, which is paused at its position limit.
        max_forks: slots that the children may take.

    Returns:
        The children that have their blocks, and pairs of blocks (source, target) that the device must copy for them.
    """
    first_children: dict[int, Sequence] = {}
    ordered = list(pairs)
    for child, parent in ordered:
        first_children.setdefault(parent.id, child)
    ordered.sort(key=lambda pair: first_children[pair[1].id] is not pair[0])  # children that need no copy come first
    forked: list[Forked] = []
    copies: list[int] = []
    for child, parent in ordered:
        full = parent.position_limit // block_size
        kept = len(parent.blocks) if first_children[parent.id] is child else full
        missing = -(-child.position_limit // block_size) - kept
        if len(forked) == max_forks or missing > pool.num_free:
            continue
        pool.share(parent.blocks[:kept])
        own = pool.allocate(missing)
        if kept < len(parent.blocks):
            copies += parent.blocks[full], own[0]
        child.blocks, child.num_computed_tokens = parent.blocks[:kept] + own, parent.position_limit
        forked.append(Forked(child, parent.slot, full))
    return forked, copies
