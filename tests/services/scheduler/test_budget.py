import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.budget import Budget


def settle(budget: Budget, base_us: float, per_token_us: float, wanted: int, steps: int = 400) -> list[int]:
    """Runs steps whose time is linear in their tokens; the tokens of each."""
    sizes = []
    for _ in range(steps):
        tokens = min(wanted, budget.tokens)
        budget.observe(int(base_us + per_token_us * tokens), tokens)
        sizes.append(tokens)
    return sizes


def test_without_room_nothing_changes_it() -> None:
    budget = Budget(512, 512, 512, 50.0)
    settle(budget, 1e6, 1e3, 512)
    assert budget.tokens == 512


@pytest.mark.parametrize("target_ms", [5.0, 10.0, 40.0])
def test_it_settles_where_steps_meet_the_target(target_ms: float) -> None:
    budget = Budget(2048, 16, 2048, target_ms)
    ideal = (target_ms * 1000 - 2000) / 50
    sizes = settle(budget, 2000, 50, 2048)[-100:]
    assert max(sizes) <= ideal * 1.1
    assert sum(sizes) / len(sizes) >= ideal * 0.7
    late = sum(2000 + 50 * tokens > target_ms * 1000 for tokens in sizes)
    assert late <= len(sizes) / 5


def test_it_comes_back_when_steps_become_cheap() -> None:
    budget = Budget(1024, 16, 1024, 10)
    settle(budget, 2000, 200, 1024)
    assert budget.tokens < 100
    settle(budget, 2000, 1, 1024)
    assert budget.tokens == 1024


def test_it_grows_fast_while_steps_take_next_to_nothing() -> None:
    budget = Budget(512, 512, 4096, 50)
    sizes = settle(budget, 2000, 2, 4096, steps=12)
    assert sizes[0] == 512
    assert sizes[-1] == 4096


def test_it_stays_where_it_began_while_steps_are_too_long() -> None:
    budget = Budget(512, 512, 4096, 50)
    assert set(settle(budget, 10_000, 500, 4096)) == {512}


def test_small_steps_that_are_fast_say_nothing_about_large_ones() -> None:
    budget = Budget(1024, 16, 1024, 10)
    settle(budget, 2000, 200, 1024)
    small = budget.tokens
    settle(budget, 2000, 1, 4)
    assert budget.tokens == small


def test_steps_of_an_older_and_larger_budget_shrink_it_once() -> None:
    budget = Budget(1024, 16, 1024, 10)
    budget.observe(50_000, 1024)
    once = budget.tokens
    for _ in range(8):
        budget.observe(50_000, 1024)
    assert budget.tokens == once


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 4096))), st.floats(0.1, 1000))
def test_it_never_leaves_its_bounds(steps: list[tuple[int, int]], target_ms: float) -> None:
    budget = Budget(100, 32, 512, target_ms)
    for elapsed, tokens in steps:
        budget.observe(elapsed, tokens)
        assert 32 <= budget.tokens <= 512
