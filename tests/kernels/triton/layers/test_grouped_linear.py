"""Products of tokens grouped by expert."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.layers.grouped_linear import grouped_linear
from pagewire.kernels.triton.layers.moe_routing import group
from tests.kernels.triton.batches import DEVICE
from tests.kernels.triton.references.grouped_linear import reference


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def choices(tokens: int, count: int, experts: int, seed: int) -> torch.Tensor:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(count).indices.to(DEVICE, torch.int32)


def check(tokens: int, count: int, experts: int, size: int, outputs: int) -> None:
    x, weight = values(tokens, size, seed=1), values(experts, outputs, size, seed=2)
    chosen = choices(tokens, count, experts, seed=3)
    groups = group(chosen, range(experts))
    by_place = grouped_linear(x, weight, groups, gather=True)
    by_token = by_place[groups.places.long()].view(tokens, count, outputs)
    torch.testing.assert_close(by_token.double(), reference(x, weight, chosen), rtol=1e-4, atol=1e-4)
    each = x[groups.pairs // count].contiguous()
    torch.testing.assert_close(grouped_linear(each, weight, groups, gather=False), by_place)


def test_each_token_is_multiplied_by_its_experts() -> None:
    check(tokens=40, count=2, experts=4, size=80, outputs=70)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 20), st.integers(1, 3), st.integers(3, 9), st.integers(1, 70), st.integers(1, 70))
def test_any_shape_equals_the_reference(tokens: int, count: int, experts: int, size: int, outputs: int) -> None:
    check(tokens, count, experts, size, outputs)


def test_all_tokens_may_choose_one_expert() -> None:
    x, weight = values(35, 16, seed=1), values(3, 16, 16, seed=2)
    chosen = torch.full((35, 1), 1, dtype=torch.int32, device=DEVICE)
    groups = group(chosen, range(3))
    by_pair = grouped_linear(x, weight, groups, gather=True)[groups.places.long()]
    torch.testing.assert_close(by_pair.double()[:, None], reference(x, weight, chosen), rtol=1e-4, atol=1e-4)


def test_a_rank_multiplies_the_tokens_of_its_experts_alone() -> None:
    x, weight, chosen = values(20, 24, seed=1), values(6, 30, 24, seed=2), choices(20, 3, 6, seed=3)
    own = range(2, 5)
    groups = group(chosen, own)
    made = grouped_linear(x, weight[own.start : own.stop].contiguous(), groups, gather=True)
    places = groups.places.view(20, 3).long()
    expected = reference(x, weight, chosen)[places >= 0]
    torch.testing.assert_close(made[places[places >= 0]].double(), expected, rtol=1e-4, atol=1e-4)
