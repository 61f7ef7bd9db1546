"""Each fork gets the blocks that it shares, and its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.scheduler.policy.beam_search.fork_blocks import fork_blocks
from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.services.scheduler.policy.sequence_table import SequenceTable
from pagewire.services.scheduler.policy.term_limits import TermLimits
from tests.services.scheduler.policy.cases import sequence

SIZE = 4


def table(num_blocks: int) -> SequenceTable:
    return SequenceTable(TermLimits(num_blocks, SIZE, 8, 64, 1))


def parent(sequences: SequenceTable, computed: int, slot: int = 0) -> Sequence:
    parent = sequence(computed + 1, slot=slot, position_limit=computed)
    sequences.extend(parent, -(-computed // SIZE))
    return parent


def child(of: Sequence) -> Sequence:
    return sequence(of.position_limit + 1, position_limit=of.position_limit + 1)


def test_the_first_goes_on_in_the_last_block_and_the_others_get_a_copy() -> None:
    sequences = table(10)
    source = parent(sequences, 6, slot=3)
    children = [child(source) for _ in range(3)]
    forked, copies = fork_blocks(sequences, [(each, source) for each in children], max_forks=9)
    assert forked == [(each, source) for each in children]
    full, last = source.blocks
    second, third = children[1].blocks[1], children[2].blocks[1]
    assert [each.blocks for each in children] == [[full, last], [full, second], [full, third]]
    assert copies == [last, second, last, third]
    sequences.pool.check([source.blocks, *(each.blocks for each in children)])


def test_full_blocks_are_shared_and_each_gets_a_new_one() -> None:
    sequences = table(10)
    source = parent(sequences, 8)
    children = [child(source) for _ in range(2)]
    forked, copies = fork_blocks(sequences, [(each, source) for each in children], max_forks=9)
    assert copies == []
    assert len(forked) == 2
    assert all(each.blocks[:2] == source.blocks for each in children)
    assert len({each.blocks[2] for each in children} | set(source.blocks)) == 4
    assert all(each.num_computed_tokens == 8 for each in children)


@pytest.mark.parametrize(("max_forks", "spare"), [(2, 9), (9, 0)])
def test_children_that_need_no_copy_come_first(max_forks: int, spare: int) -> None:
    sequences = table(4 + spare)
    one, two = parent(sequences, 5, slot=0), parent(sequences, 5, slot=1)
    a, b, c = child(one), child(one), child(two)
    forked, copies = fork_blocks(sequences, [(a, one), (b, one), (c, two)], max_forks)
    assert forked == [(a, one), (c, two)]
    assert copies == []
    assert b.blocks == []


@given(
    computed=st.lists(st.integers(1, 13), min_size=1, max_size=4),
    parent_indices=st.lists(st.integers(0, 3), max_size=8),
    spare=st.integers(0, 8),
    max_forks=st.integers(0, 8),
)
def test_no_block_is_lost_and_no_shared_block_is_written(
    computed: list[int], parent_indices: list[int], spare: int, max_forks: int
) -> None:
    sequences = table(16 + spare)
    parents = [parent(sequences, positions, slot) for slot, positions in enumerate(computed)]
    pairs = [(child(source), source) for source in (parents[i % len(parents)] for i in parent_indices)]
    forked, copies = fork_blocks(sequences, pairs, max_forks)
    children = [each for each, _ in forked]
    assert len(children) <= max_forks
    sequences.pool.check([each.blocks for each in (*parents, *children)])
    for source in parents:
        sequences.pool.free(source.blocks)
    sequences.pool.check([each.blocks for each in children])
    sources, targets = copies[::2], copies[1::2]
    assert not set(sources) & set(targets)
    assert len(set(targets)) == len(targets)
    written = [block for each in children for block in each.blocks[each.num_computed_tokens // SIZE :]]
    assert len(set(written)) == len(written)
    held = [block for each in children for block in each.blocks]
    assert all(held.count(block) == 1 for block in written)
    assert all(block in held for block in sources), "the content of a copied block must stay until it is copied"
