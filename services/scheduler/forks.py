"""Copy-on-write: which blocks a sequence gets that begins where another one stands."""

from collections.abc import Iterable
from typing import NamedTuple

from pagewire.services.scheduler.blocks import BlockPool
from pagewire.services.scheduler.sequence import Sequence


class Forked(NamedTuple):
    """A child that has its blocks."""

    child: Sequence
    source: int
    """Slot of its parent."""
    shared: int
    """Leading blocks that nobody writes to any more: those that its parent has filled."""


def inherit(
    pool: BlockPool, size: int, born: Iterable[tuple[Sequence, Sequence]], seats: int
) -> tuple[list[Forked], list[int]]:
    """Gives blocks of `size` positions to children of parents at rest, at most to `seats` of them and while there are
    any; and the pairs of blocks (source, target) that the device must copy for them.

    `born` are pairs of a child and its parent, which holds blocks for exactly the positions that it has computed. All
    children share the full ones. In the last one, if it is not full, the first child of a parent goes on, and the
    others get a copy of it. The parents keep their own references.
    """
    heirs: dict[int, Sequence] = {}
    pairs = list(born)
    for child, parent in pairs:
        heirs.setdefault(parent.id, child)
    pairs.sort(key=lambda pair: heirs[pair[1].id] is not pair[0])  # those who need no copy come first
    forked: list[Forked] = []
    copies: list[int] = []
    for child, parent in pairs:
        full = parent.halt // size
        kept = len(parent.blocks) if heirs[parent.id] is child else full
        missing = -(-child.halt // size) - kept
        if len(forked) == seats or missing > pool.available:
            continue
        pool.share(parent.blocks[:kept])
        own = pool.allocate(missing)
        if kept < len(parent.blocks):
            copies += parent.blocks[full], own[0]
        child.blocks, child.computed = parent.blocks[:kept] + own, parent.halt
        forked.append(Forked(child, parent.slot, full))
    return forked, copies
