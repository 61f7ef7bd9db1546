import pytest

from pagewire.services.scheduler.policy.block_pool import BlockPool, IntegrityError


def test_the_block_that_is_free_longest_is_allocated_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(4) == [*reversed(second), *reversed(first)]


def test_the_tail_of_a_sequence_is_reused_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.free(blocks)
    assert pool.allocate(1) == [blocks[2]]


def test_a_shared_block_is_idle_when_its_last_holder_has_gone() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    assert pool.count_unshared(blocks) == 0
    pool.free(blocks)
    assert (pool.num_used, pool.count_unshared(blocks), pool.count_free(blocks)) == (1, 1, 0)
    pool.free(blocks)
    assert (pool.num_used, pool.count_free(blocks)) == (0, 1)
    pool.share(blocks)
    assert (pool.num_used, pool.num_free) == (1, 1)
    pool.check([blocks])


def test_shared_and_blank_blocks_are_counted() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert (pool.num_shared, pool.num_blank) == (0, 2)
    pool.share(blocks)
    pool.share(blocks[:1])
    assert pool.num_shared == 2
    pool.free(blocks)
    assert pool.num_shared == 1
    pool.free(blocks)
    pool.free(blocks[:1])
    assert (pool.num_shared, pool.num_blank) == (0, 2)
    pool.allocate(3)
    assert pool.num_blank == 0


def test_the_clock_shows_which_blocks_were_allocated_since() -> None:
    pool = BlockPool(2)
    kept, lost = pool.allocate(1), pool.allocate(1)
    clock = pool.clock
    pool.free(lost)
    pool.allocate(1)
    assert pool.allocated_at[kept[0]] <= clock < pool.allocated_at[lost[0]]


def test_a_double_free_is_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(IntegrityError, match="twice"):
        pool.free(blocks)


@pytest.mark.parametrize("holders", [[], [[0], [0]], [[0, 1]]])
def test_the_check_compares_the_counts_with_the_holders(holders: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    pool.check([[0]])
    with pytest.raises(IntegrityError):
        pool.check(holders)


def test_the_holder_of_a_block_shared_apart_can_free_it_and_allocate_one() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.share(blocks, apart=True)
    assert (pool.num_used, pool.num_free) == (1, 1)
    pool.free(blocks, apart=True)
    assert (pool.num_used, pool.num_free) == (1, 2)
    pool.free(blocks, apart=True)
    assert (pool.num_used, pool.num_free) == (0, 3)
