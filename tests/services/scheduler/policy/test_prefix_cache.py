import pytest

from pagewire.services.scheduler.policy.block_groups import BlockGroups
from pagewire.services.scheduler.policy.block_pool import BlockPool
from pagewire.services.scheduler.policy.prefix_cache import PrefixCache
from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.shared.messages.step import Finish
from tests.services.scheduler.policy.cases import sequence

SIZE = 4


class Cache:
    """PrefixCache over a pool, and what the policy does with them."""

    def __init__(self, blocks: int = 16) -> None:
        self.pool = BlockPool(blocks)
        self.prefix_cache = PrefixCache(self.pool, BlockGroups((0,), SIZE), SIZE)

    def begin(self, tokens: list[int], salt: str = "") -> Sequence:
        one = sequence(list(tokens), cache_salt=salt)
        shared = self.prefix_cache.match_prefix(one)
        assert shared is not None
        blocks, stamps, _ = shared
        self.pool.share(blocks)
        own = self.pool.allocate(-(-len(tokens) // SIZE) - len(blocks))
        one.num_computed_tokens = one.num_cached_tokens = len(blocks) * SIZE
        one.blocks, one.stamps = blocks + own, stamps + [self.pool.clock] * len(own)
        self.prefix_cache.begin(one)
        return one

    def compute(self, one: Sequence, positions: int) -> None:
        one.num_computed_tokens = positions

    def end(self, one: Sequence) -> None:
        if one.num_computed_tokens < len(one.tokens):
            self.prefix_cache.cancel_prefill(one)
        self.prefix_cache.end(one)
        self.pool.free(one.blocks)

    def run(self, tokens: list[int], salt: str = "") -> Sequence:
        one = self.begin(tokens, salt)
        self.compute(one, len(tokens))
        self.end(one)
        return one

    def match(self, tokens: list[int], salt: str = "") -> list[int] | None:
        prefix = self.prefix_cache.match_prefix(sequence(tokens, cache_salt=salt))
        return None if prefix is None else prefix.blocks


TEXT = list(range(100, 120))


def test_full_blocks_are_known_but_for_the_last_token() -> None:
    cache = Cache()
    one = cache.run(TEXT)
    assert cache.match(TEXT) == one.blocks[:4]
    assert cache.match([*TEXT, 1]) == one.blocks[:5]
    assert cache.match(TEXT[:9]) == one.blocks[:2]
    assert cache.match(TEXT[:3]) == []


def test_a_prefix_ends_where_the_tokens_differ() -> None:
    cache = Cache()
    one = cache.run(TEXT)
    assert cache.match([*TEXT[:9], 0, *TEXT[10:]]) == one.blocks[:2]
    assert cache.match([0, *TEXT]) == []


def test_another_salt_shares_nothing_and_waits_for_nothing() -> None:
    cache = Cache()
    ours = cache.run(TEXT, "ours")
    theirs = cache.begin(TEXT, "theirs")
    assert theirs.num_cached_tokens == 0
    assert cache.match(TEXT) == []
    assert cache.match(TEXT, "theirs") is None
    assert cache.match(TEXT, "ours") == ours.blocks[:4]
    cache.compute(theirs, 20)
    assert cache.match(TEXT, "theirs") == theirs.blocks[:4]
    branch = [*TEXT[:8], *range(12)]
    cache.run(branch, "ours")
    assert cache.match([*branch, 1], "theirs") == theirs.blocks[:2]


def test_branches_are_followed() -> None:
    cache = Cache()
    trunk = cache.run(TEXT)
    branch = cache.run([*TEXT[:8], *range(50)][:20])
    assert branch.num_cached_tokens == 8
    twig = cache.run([*TEXT[:8], *range(8), 99, 98, 97, 96, 95])
    assert twig.num_cached_tokens == 16
    assert cache.match([*TEXT, 1]) == trunk.blocks
    assert cache.match([*twig.tokens, 1]) == [*trunk.blocks[:2], *branch.blocks[2:4], *twig.blocks[4:5]]


def test_blocks_of_generated_tokens_are_found_too() -> None:
    cache = Cache()
    one = cache.begin(TEXT[:6])
    cache.compute(one, 6)
    one.tokens += TEXT[6:]
    one.blocks += cache.pool.allocate(3)
    one.stamps += [cache.pool.clock] * 3
    assert cache.match([*TEXT, 1]) == one.blocks[:1]
    cache.compute(one, 19)
    assert cache.match([*TEXT, 1]) == one.blocks[:4]
    cache.end(one)
    assert cache.match([*TEXT, 1]) == one.blocks[:4]


def test_an_equal_prompt_waits_for_blocks_in_progress() -> None:
    cache = Cache()
    one = cache.begin(TEXT)
    assert cache.match(TEXT) is None
    cache.compute(one, 10)
    assert cache.match(TEXT) is None
    assert cache.match([*TEXT[:8], *range(8)]) == one.blocks[:2]
    cache.compute(one, 20)
    assert cache.match(TEXT) == one.blocks[:4]


def test_no_sequence_waits_for_one_that_has_gone() -> None:
    cache = Cache()
    one = cache.begin(TEXT)
    cache.compute(one, 10)
    cache.prefix_cache.cancel_prefill(one)
    assert cache.match(TEXT) == one.blocks[:2]
    cache.end(one)
    again = cache.begin(TEXT)
    assert again.num_cached_tokens == 8
    assert cache.match(TEXT) is None


@pytest.mark.parametrize("steps", [0, 3])
def test_an_unfinished_prompt_leaves_no_prefix_and_blocks_no_other(steps: int) -> None:
    cache = Cache()
    one = cache.begin(TEXT)
    cache.compute(one, steps)
    cache.end(one)
    assert cache.match(TEXT) == []
    cache.run(TEXT)
    assert len(cache.match(TEXT) or []) == 4


def test_a_reused_block_and_its_successors_are_no_longer_matched() -> None:
    cache = Cache(blocks=6)
    one = cache.run(TEXT)
    other = cache.pool.allocate(3)  # one was never used, then the tail
    assert cache.match(TEXT) == one.blocks[:3]
    assert set(other) & set(one.blocks) == {one.blocks[4], one.blocks[3]}
    cache.pool.free(other)
    assert cache.match(TEXT) == one.blocks[:3]


def test_a_prefix_that_was_given_away_and_computed_again_is_known_again() -> None:
    cache = Cache(blocks=8)
    cache.run(TEXT)
    cache.run(list(range(32)))  # takes every block
    assert cache.match(TEXT) == []
    again = cache.run(TEXT)
    assert cache.match(TEXT) == again.blocks[:4]


def test_blocks_of_a_sequence_that_was_not_finite_are_not_found() -> None:
    cache = Cache()
    shared = cache.run(TEXT[:8])
    one = cache.begin([*TEXT, 1])
    cache.compute(one, 21)
    one.finish = Finish.NOT_FINITE
    cache.end(one)
    assert cache.match([*TEXT, 1]) == shared.blocks[:2]


def test_a_branch_is_lost_with_its_trunk() -> None:
    cache = Cache(blocks=8)
    trunk = cache.run(TEXT[:8])
    cache.run([*TEXT[:8], *range(8)])
    cache.pool.free(cache.pool.allocate(8))
    fresh = cache.run([*TEXT[:8], 1])
    assert fresh.num_cached_tokens == 0
    assert cache.match([*TEXT[:8], *range(8)]) == fresh.blocks[:2]
    assert trunk.num_cached_tokens == 0


def test_runs_that_are_lost_are_forgotten() -> None:
    cache = Cache(blocks=4)
    for i in range(200):
        cache.run([i] * 12)
        assert len(cache.prefix_cache._runs) <= 2 * 4 + 1
    assert not cache.prefix_cache.open


def test_tokens_of_lost_runs_are_forgotten_in_a_large_pool_too() -> None:
    """A run keeps the tokens of its sequence, of which a pool has room for few if they are long."""
    cache = Cache(blocks=1000)
    for i in range(500):
        cache.run([i] * 400)
    assert len(cache.prefix_cache._runs) <= 2 * 10 + 1


class Windows(Cache):
    """Two groups of layers: one that sees all, and one with a window of 8."""

    def __init__(self, blocks: int = 32) -> None:
        self.pool = BlockPool(blocks)
        self.prefix_cache = PrefixCache(self.pool, BlockGroups((0, 8), SIZE), SIZE)

    def computed(self, tokens: list[int]) -> Sequence:
        """A sequence that has ended. Its blocks stay free."""
        one = sequence(list(tokens))
        one.blocks = self.pool.allocate(2 * -(-len(tokens) // SIZE))
        one.stamps = [self.pool.clock] * len(one.blocks)
        self.prefix_cache.begin(one)
        self.compute(one, len(tokens))
        self.end(one)
        return one

    def lose(self, block: int) -> None:
        """Overwrites the content of a block."""
        self.pool.clock += 1
        self.pool.allocated_at[block] = self.pool.clock


def test_layers_with_a_window_need_the_last_blocks_of_a_prefix_alone() -> None:
    cache = Windows()
    one = cache.computed(TEXT)
    cache.lose(one.blocks[1])  # entry 0 of the window, which leaves it behind
    prefix = cache.prefix_cache.match_prefix(sequence([*TEXT, 1]))
    assert prefix == (one.blocks[: 2 * 5], one.stamps[: 2 * 5], [3])
    assert cache.match(TEXT[:9]) == [], "behind two entries the window still sees the first"


def test_a_prefix_is_cut_back_to_where_the_window_is_there() -> None:
    cache = Windows()
    one = cache.computed(TEXT)
    cache.lose(one.blocks[2 * 4 + 1])
    assert cache.match([*TEXT, 1]) == one.blocks[: 2 * 4]


def test_layers_that_see_all_need_every_block() -> None:
    cache = Windows()
    one = cache.computed(TEXT)
    cache.lose(one.blocks[2 * 2])
    assert cache.match([*TEXT, 1]) == one.blocks[: 2 * 2]
