from collections import deque
from math import inf
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.devices.cuda.graph_sizes import mixed_sizes
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
    budget = Budget(512, 512, inf)
    assert set(settle(budget, 1e6, 1e3, 512)) == {512}
    assert set(settle(budget, 10, 0, 512, decodes=400)) == {512}


@pytest.mark.parametrize("target_ms", [5.0, 10.0, 40.0])
def test_the_budget_settles_where_steps_meet_the_target(target_ms: float) -> None:
    budget = Budget(2048, 2048, target_ms, 16)
    ideal = (target_ms * 1000 - 2000) / 50
    sizes = settle(budget, 2000, 50, 2048)[-100:]
    assert max(sizes) <= ideal * 1.1
    assert sum(sizes) / len(sizes) >= ideal * 0.7
    late = sum(2000 + 50 * tokens > target_ms * 1000 for tokens in sizes)
    assert late <= len(sizes) / 5


def test_a_budget_has_few_very_long_steps_until_it_settles() -> None:
    sizes = settle(Budget(512, 4096, 100, 16), 13_000, 1400, 4096)
    assert sum(13_000 + 1400 * tokens > 200_000 for tokens in sizes) <= 3


def test_halving_leaves_the_budget_near_the_target() -> None:
    sizes = settle(Budget(512, 512, 100, 16), 40_000, 500, 512)
    assert min(sizes) * 500 + 40_000 >= 100_000 * 0.7


def test_the_budget_recovers_when_steps_become_cheap() -> None:
    budget = Budget(1024, 1024, 10, 16)
    settle(budget, 2000, 200, 1024)
    assert budget.tokens(1) < 100
    settle(budget, 2000, 1, 1024)
    assert budget.tokens(1) == 1024


def test_the_budget_grows_fast_while_steps_are_very_short() -> None:
    budget = Budget(512, 4096, 50, 128)
    sizes = settle(budget, 2000, 2, 4096, steps=12)
    assert sizes[0] == 512
    assert sizes[-1] == 4096


@pytest.mark.parametrize("decodes", [1, 8, 100, 256])
def test_a_step_of_any_length_has_room_for_all_decodes_and_for_prompts(decodes: int) -> None:
    sizes = settle(Budget(512, 4096, 50, 128), 10_000, 500_000, 4096, decodes=decodes)
    assert min(sizes) == sizes[-1] == decodes + 128


def test_the_room_for_prompts_follows_the_mean_of_ended_sequences() -> None:
    budget = Budget(512, 4096, 50, 64, 4096)
    settle(budget, 10_000, 500_000, 4096)
    assert budget.tokens(32) == 32 + 64
    for _ in range(100):
        budget.count(prompt_tokens=300, output_tokens=60)
    assert budget.tokens(32) == 32 + 2 * 5 * 32
    for _ in range(1000):
        budget.count(prompt_tokens=20, output_tokens=200)
    assert budget.tokens(32) == 32 + 64


@given(
    st.lists(st.tuples(st.integers(0, 8192), st.integers(0, 8192)), max_size=80),
    st.integers(1, 256),
    st.sampled_from([(64, 4096), (512, 2048), (16, 0)]),
)
def test_the_room_for_prompts_keeps_its_bounds_under_any_load(
    ended: list[tuple[int, int]], decodes: int, bounds: tuple[int, int]
) -> None:
    least, most = bounds
    budget = Budget(8192, 8192, 0.0, least, most)
    for prompt_tokens, output_tokens in ended:
        budget.count(prompt_tokens, output_tokens)
    assert decodes + least // 2 <= budget.tokens(decodes) <= decodes + max(least, most)


@pytest.mark.parametrize("prompt", [64, 200, 800])
@pytest.mark.parametrize(("clients", "token_us"), [(24, 900), (32, 300), (32, 600)])
def test_prompts_of_many_clients_wait_for_few_steps(clients: int, token_us: int, prompt: int) -> None:
    """Each client sends a prompt again when its 60 tokens have come."""
    budget = budget_of(TermLimits(9000, 16, clients, budget=512, window=8, max_budget=4096))
    prompts, outputs, waits = deque([(0, prompt)] * clients), list[int](), list[int]()
    for step in range(2000):
        decodes, room = len(outputs), budget.tokens(len(outputs)) - len(outputs)
        outputs = [left - 1 for left in outputs if left > 1]
        for _ in range(decodes - len(outputs)):
            budget.count(prompt, 60)
            prompts.append((step, prompt))
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


def test_the_room_for_prompts_ends_at_the_ceiling() -> None:
    budget = Budget(512, 600, 50, 128)
    settle(budget, 10_000, 500_000, 4096)
    assert budget.tokens(500) == 600


def test_while_nothing_decodes_steps_are_as_large_as_at_first() -> None:
    budget = Budget(512, 4096, 50, 128)
    settle(budget, 10_000, 5_000, 4096)
    assert budget.tokens(1) == 129
    assert budget.tokens(0) == 512


def test_fast_small_steps_do_not_change_the_budget() -> None:
    budget = Budget(1024, 1024, 10, 16)
    settle(budget, 2000, 200, 1024)
    small = budget.tokens(1)
    settle(budget, 2000, 1, 4)
    assert budget.tokens(1) == small


def test_steps_of_an_older_and_larger_budget_shrink_it_once() -> None:
    budget = Budget(1024, 1024, 10, 16)
    budget.observe(50_000, 1024)
    once = budget.tokens(1)
    for _ in range(8):
        budget.observe(50_000, 1024)
    assert budget.tokens(1) == once == 512


def test_a_step_without_tokens_does_not_change_the_budget() -> None:
    budget = Budget(1024, 1024, 10, 16)
    budget.observe(10**6, 0)
    assert budget.tokens(1) == 1024


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 4096), st.integers(0, 100))),
    st.floats(0.1, 1000),
)
def test_the_budget_never_leaves_its_bounds(steps: list[tuple[int, int, int]], target_ms: float) -> None:
    budget = Budget(200, 512, target_ms, 32)
    for elapsed, tokens, decodes in steps:
        budget.observe(elapsed, tokens)
        assert (decodes + 32 if decodes else 200) <= budget.tokens(decodes) <= 512


def test_prompts_beside_decodes_have_a_room_of_their_own() -> None:
    budget = Budget(8192, 8192, 0.0, 512, 2048)
    assert budget.tokens(decodes=0) == 8192
    assert budget.tokens(decodes=16) == 512
    assert budget.tokens(decodes=128) == 640
    assert Budget(600, 600, 0.0, 512, 2048).tokens(200) == 600


@pytest.mark.parametrize("decodes", range(1, 1024, 13))
def test_steps_without_a_target_have_the_sizes_that_devices_capture(decodes: int) -> None:
    budget = Budget(8192, 8192, 0.0, 512, 1536)
    budget.count(prompt_tokens=2000, output_tokens=200)
    sizes = mixed_sizes(2048)
    assert budget.tokens(decodes) in sizes or budget.tokens(decodes) > sizes[-1]


def test_a_configured_step_time_decides_the_budget_alone() -> None:
    limits = TermLimits(100, 16, 8, budget=4096, window=8, itl_target_ms=50.0, mixed_prompt_tokens=512)
    budget = budget_of(limits)
    budget.count(prompt_tokens=2000, output_tokens=2)
    assert budget.tokens(decodes=4) == 4096
    settle(budget, 10_000, 500_000, 4096)
    assert budget.tokens(decodes=4) == 4 + 16
