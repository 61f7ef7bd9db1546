"""The routing of a mixture of experts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.layers import moe_routing
from pagewire.kernels.triton.layers.moe_routing import ROWS, choose, combine, group
from tests.kernels.triton.batches import DEVICE
from tests.kernels.triton.references import moe_routing as moe_routing_reference


def random_logits(tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens)).to(DEVICE, dtype)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "count"), [(8, 2), (60, 4), (5, 5)])
def test_a_token_takes_its_likeliest_experts(experts: int, count: int, dtype: torch.dtype, *, normalized: bool) -> None:
    # Permutations: rounded to bfloat16, random numbers would be equal now and then.
    logits = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i)) for i in range(9)])
    logits = (logits / 8).to(DEVICE, dtype)
    weights, chosen = choose(logits, count, normalized=normalized)
    expected, experts_of = moe_routing_reference.reference(logits, count, normalized=normalized)
    assert torch.equal(chosen.long(), experts_of)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_equal_experts_are_taken_in_order_and_once_each() -> None:
    assert choose(torch.zeros(1, 6, device=DEVICE), 3, normalized=True)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("experts", [6, 8])
def test_without_a_number_the_experts_exist_all_the_same(experts: int) -> None:
    weights, chosen = choose(torch.full((2, experts), torch.nan, device=DEVICE), 3, normalized=True)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [[0.0, 0.0, 0.0]] * 2


def check_groups(chosen: torch.Tensor, experts: range) -> None:
    """`experts`: those of a rank. The pairs of others are in no tile, and so in no product."""
    groups, flat = group(chosen, experts), chosen.flatten().tolist()
    own = sorted((pair for pair in range(len(flat)) if flat[pair] in experts), key=flat.__getitem__)
    assert groups.pairs[: len(own)].tolist() == own
    place_of = {pair: place for place, pair in enumerate(own)}
    assert groups.places.tolist() == [place_of.get(pair, -1) for pair in range(len(flat))]
    tiles = [tile for tile in groups.tiles.tolist() if tile[0] >= 0]
    assert [place for _, first, end in tiles for place in range(first, end)] == list(range(len(own)))
    for expert, first, end in tiles:
        assert 0 < end - first <= ROWS
        assert {flat[pair] for pair in groups.pairs[first:end].tolist()} == {experts[expert]}
    assert all(tile[0] == -1 for tile in groups.tiles.tolist()[len(tiles) :])


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(3, 9))
def test_each_place_is_in_one_tile_of_its_expert(tokens: int, count: int, experts: int) -> None:
    check_groups(random_logits(tokens, experts).topk(count).indices.int(), range(experts))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(3, 9), st.integers(1, 4))
def test_each_rank_groups_the_pairs_of_its_experts(tokens: int, count: int, experts: int, each: int) -> None:
    chosen = random_logits(tokens, experts).topk(count).indices.int()
    for first in range(0, experts, each):
        check_groups(chosen, range(first, min(first + each, experts)))


def test_more_pairs_than_are_read_at_a_time_are_grouped() -> None:
    chosen = random_logits(700, 4).topk(2).indices.int()
    for experts in (range(4), range(2), range(2, 4)):
        check_groups(chosen, experts)


def test_all_tokens_may_choose_the_same_experts() -> None:
    chosen = torch.tensor([[5, 1]] * 35, dtype=torch.int32, device=DEVICE)
    for experts in (range(6), range(3, 6), range(2, 4)):
        check_groups(chosen, experts)


def test_outputs_are_summed_by_weight() -> None:
    tokens, count, experts, size = 7, 3, 5, moe_routing.BLOCK + 3
    weights, chosen = choose(random_logits(tokens, experts), count, normalized=True)
    groups = group(chosen, range(experts))
    outputs = torch.randn(tokens * count, size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    each = outputs[groups.places.long()].view(tokens, count, size).double()
    sums = combine(outputs, weights, groups)
    torch.testing.assert_close(sums.double(), (each * weights[..., None].double()).sum(1), rtol=1e-5, atol=1e-6)


def test_outputs_of_other_ranks_add_nothing_whatever_they_are() -> None:
    tokens, count, experts = 7, 3, range(2, 4)
    weights, chosen = choose(random_logits(tokens, 5), count, normalized=True)
    groups = group(chosen, experts)
    outputs = torch.full((tokens * count, 3), torch.nan, device=DEVICE)
    own = torch.isin(chosen, torch.tensor(experts, device=DEVICE))
    outputs[: own.sum()] = 1
    torch.testing.assert_close(combine(outputs, weights, groups)[:, 0], (weights * own).sum(1))
