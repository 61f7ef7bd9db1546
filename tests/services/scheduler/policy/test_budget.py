from collections import deque
from math import inf
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.scheduler.policy.budget import Budget, budget_of
from pagewire.services.scheduler.policy.term_limits import TermLimits


def settle(
    budget: Budget, base_us: float, per_token_us: float, waiting: int, steps: int = 400, decodes: int = 1
) -> list[int]:
    """Runs steps whose time is linear in their tokens; returns the tokens of each."""
    sizes = []
    for _ in range(steps):
        tokens = min(waiting, budget.tokens(decodes))
        budget.observe(int(base_us + per_token_us * tokens), tokens)
        sizes.append(tokens)
    return sizes


def test_without_a_target_the_budget_does_not_change() -> None:
    budget = Budget(512, 512, 0, inf)
    assert set(settle(budget, 1e6, 1e3, 512)) == {512}
    assert set(settle(budget, 10, 0, 512, decodes=400)) == {512}


@pytest.mark.parametrize("target_ms", [5.0, 10.0, 40.0])
def test_the_budget_settles_where_steps_meet_the_target(target_ms: float) -> None:
    budget = Budget(2048, 2048, 16, target_ms)
    ideal = (target_ms * 1000 - 2000) / 50
    sizes = settle(budget, 2000, 50, 2048)[-100:]
    assert max(sizes) <= ideal * 1.1
    assert sum(sizes) / len(sizes) >= ideal * 0.7
    late = sum(2000 + 50 * tokens > target_ms * 1000 for tokens in sizes)
    assert late <= len(sizes) / 5


def test_steps_that_take_very_long_are_few() -> None:
    sizes = settle(Budget(512, 4096, 16, 100), 13_000, 1400, 4096)
    assert sum(13_000 + 1400 * tokens > 200_000 for tokens in sizes) <= 3


def test_halving_does_not_lead_below_the_target() -> None:
    sizes = settle(Budget(512, 512, 16, 100), 40_000, 500, 512)
    assert min(sizes) * 500 + 40_000 >= 100_000 * 0.7


def test_the_budget_recovers_when_steps_become_cheap() -> None:
    budget = Budget(1024, 1024, 16, 10)
    settle(budget, 2000, 200, 1024)
    assert budget.tokens(1) < 100
    settle(budget, 2000, 1, 1024)
    assert budget.tokens(1) == 1024


def test_the_budget_grows_fast_while_steps_are_very_short() -> None:
    budget = Budget(512, 4096, 128, 50)
    sizes = settle(budget, 2000, 2, 4096, steps=12)
    assert sizes[0] == 512
    assert sizes[-1] == 4096


@pytest.mark.parametrize("decodes", [1, 8, 100, 256])
def test_however_long_steps_take_they_have_room_for_all_decodes_and_for_prompts(decodes: int) -> None:
    sizes = settle(Budget(512, 4096, 128, 50), 10_000, 500_000, 4096, decodes=decodes)
    assert min(sizes) == sizes[-1] == decodes + 128


@pytest.mark.parametrize(("decodes", "tokens"), [(1, 65), (16, 80), (20, 100), (32, 160), (64, 192), (128, 384)])
def test_room_for_prompts_grows_with_the_decodes_if_it_is_to(decodes: int, tokens: int) -> None:
    assert settle(Budget(512, 4096, 64, 50, 2), 10_000, 500_000, 4096, decodes=decodes)[-1] == tokens


@pytest.mark.parametrize(("clients", "token_us"), [(24, 900), (32, 300), (32, 600)])
def test_prompts_of_many_clients_wait_for_few_steps(clients: int, token_us: int) -> None:
    """Each client sends 200 tokens again when its 60 have come."""
    budget = budget_of(TermLimits(9000, 16, clients, budget=512, window=8, max_budget=4096))
    prompts, outputs, waits = deque([(0, 200)] * clients), list[int](), list[int]()
    for step in range(2000):
        decodes, room = len(outputs), budget.tokens(len(outputs)) - len(outputs)
        outputs = [left - 1 for left in outputs if left > 1]
        prompts.extend([(step, 200)] * (decodes - len(outputs)))
        computed = min(room, sum(left for _, left in prompts))
        budget.observe(5000 + token_us * (computed + decodes), computed + decodes)
        while computed:
            came, left = prompts.popleft()
            part = min(left, computed)
            computed -= part
            if part < left:
                prompts.appendleft((came, left - part))
            else:
                outputs.append(59)
                waits.append(step - came)
    assert len(waits) > 5 * clients
    assert median(waits[2 * clients :]) <= 4


def test_room_for_prompts_ends_at_the_ceiling() -> None:
    budget = Budget(512, 600, 128, 50)
    settle(budget, 10_000, 500_000, 4096)
    assert budget.tokens(500) == 600


def test_while_nothing_decodes_steps_are_as_large_as_at_first() -> None:
    budget = Budget(512, 4096, 128, 50)
    settle(budget, 10_000, 5_000, 4096)
    assert budget.tokens(1) == 129
    assert budget.tokens(0) == 512


def test_small_steps_that_are_fast_say_nothing_about_large_ones() -> None:
    budget = Budget(1024, 1024, 16, 10)
    settle(budget, 2000, 200, 1024)
    small = budget.tokens(1)
    settle(budget, 2000, 1, 4)
    assert budget.tokens(1) == small


def test_steps_of_an_older_and_larger_budget_shrink_it_once() -> None:
    budget = Budget(1024, 1024, 16, 10)
    budget.observe(50_000, 1024)
    once = budget.tokens(1)
    for _ in range(8):
        budget.observe(50_000, 1024)
    assert budget.tokens(1) == once == 512


def test_a_step_without_tokens_says_nothing() -> None:
    budget = Budget(1024, 1024, 16, 10)
    budget.observe(10**6, 0)
    assert budget.tokens(1) == 1024


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 4096), st.integers(0, 100))),
    st.floats(0.1, 1000),
)
def test_the_budget_never_leaves_its_bounds(steps: list[tuple[int, int, int]], target_ms: float) -> None:
    budget = Budget(200, 512, 32, target_ms)
    for elapsed, tokens, decodes in steps:
        budget.observe(elapsed, tokens)
        assert (decodes + 32 if decodes else 200) <= budget.tokens(decodes) <= 512


def test_prompts_beside_decodes_have_a_room_of_their_own() -> None:
    budget = Budget(8192, 8192, 0, inf, mixed_prompt_tokens=512)
    assert budget.tokens(decodes=0, prompt_tokens=9000) == 8192
    assert budget.tokens(decodes=16, prompt_tokens=100) == 512
    assert budget.tokens(decodes=128, prompt_tokens=100) == 640


def test_the_room_beside_decodes_grows_with_the_waiting_prompts() -> None:
    budget = Budget(8192, 8192, 0, inf, mixed_prompt_tokens=512)
    assert [budget.tokens(1, tokens) for tokens in (0, 4096, 4097, 8193, 10**6)] == [512, 512, 1024, 2048, 2048]
    assert Budget(600, 600, 0, inf, mixed_prompt_tokens=512).tokens(100, 10**6) == 600


def test_a_step_time_that_is_set_decides_alone() -> None:
    limits = TermLimits(100, 16, 8, budget=4096, window=8, itl_target_ms=50.0, mixed_prompt_tokens=512)
    assert budget_of(limits).tokens(decodes=4) == 4096
