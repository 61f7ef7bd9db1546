"""Copy-on-write: gives blocks to beams that continue other ones."""

from collections.abc import Iterable

from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.services.scheduler.policy.sequence_table import SequenceTable


def fork_blocks(
    sequences: SequenceTable, pairs: Iterable[tuple[Sequence, Sequence]], max_forks: int
) -> tuple[list[tuple[Sequence, Sequence]], list[int]]:
    """Gives blocks to at most `max_forks` children, while there are any. Their parents keep their own references.

    Each of the `pairs` is a child and its parent, which is paused at its position limit. All children of a parent share
    its full blocks. If its last block is not full, the first child goes on in that block, and the other children get a
    copy of it. Returns the pairs whose child has its blocks, and pairs of blocks (source, target) that the device must
    copy for them.
    """
    pool, groups, size = sequences.pool, sequences.groups, sequences.limits.block_size
    first_children: dict[int, Sequence] = {}
    ordered = list(pairs)
    for child, parent in ordered:
        first_children.setdefault(parent.id, child)
    ordered.sort(key=lambda pair: first_children[pair[1].id] is not pair[0])  # children that need no copy come first
    forked: list[tuple[Sequence, Sequence]] = []
    copies: list[int] = []
    for child, parent in ordered:
        full = parent.position_limit // size * groups.count
        kept = len(parent.blocks) if first_children[parent.id] is child else full
        blocks = parent.blocks[:kept]
        missing = -(-child.position_limit // size) * groups.count - kept
        if len(forked) == max_forks or missing + len(groups.seen_of(blocks, parent.given_back)) > pool.num_free:
            continue
        sequences.share(blocks, parent.given_back)
        child.blocks, child.stamps, child.given_back = blocks, parent.stamps[:kept], parent.given_back
        own = sequences.extend(child, missing // groups.count)
        for source, target in zip(parent.blocks[kept:], own, strict=False):
            copies += source, target
        child.num_computed_tokens = parent.position_limit
        forked.append((child, parent))
    return forked, copies
