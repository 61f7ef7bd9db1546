"""The updates of adapters, of any mix of them, with products of every shape."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.low_rank import LowRank
from pagewire.kernels.triton.layers.low_rank import (
    FIELDS,
    PARTS,
    ROWS,
    Tiles,
    Updates,
    add_updates,
    most_tiles,
    pack,
    padded,
    size_of,
    splits_of,
)
from tests.kernels.triton.batches import DEVICE, assert_close
from tests.kernels.triton.references.low_rank import reference

PRODUCT, PRODUCTS = 1, 3


def adapter(
    inputs: int, outputs: Sequence[int], ranks: Sequence[int], seed: int, dtype: torch.dtype = torch.float32
) -> list[LowRank]:
    """An update of each part of a product that has a rank."""
    random = torch.Generator().manual_seed(seed)
    updates, first = [], 0
    for count, rank in zip(outputs, ranks, strict=True):
        if rank:
            shrink = torch.randn(rank, inputs, generator=random) * inputs**-0.5
            expand = torch.randn(count, rank, generator=random) * rank**-0.5
            updates.append(LowRank(shrink.to(dtype), expand.to(dtype), first, 0.3 + seed))
        first += count
    return updates


def placed(adapters: Sequence[Sequence[LowRank]], dtype: torch.dtype) -> Updates:
    """The adapters in places one after the other, as the updates of one product of several."""
    size = max(size_of({0: one}) for one in adapters)
    updates = Updates(
        torch.zeros(len(adapters), size, dtype=dtype),
        torch.zeros(len(adapters), PRODUCTS, FIELDS, dtype=torch.int32),
        torch.zeros(len(adapters), PRODUCTS, PARTS),
    )
    for place, one in enumerate(adapters):
        if one:
            pack({PRODUCT: one}, Updates(updates.factors[place], updates.table[place], updates.scales[place]))
    return Updates(*(tensor.to(DEVICE) for tensor in (updates.factors, updates.table, updates.scales)))


def gathered(owners: Sequence[int], places: int) -> Tiles:
    """Tiles of the tokens whose adapters are in the places `owners`, -1: none."""
    tokens: list[int] = []
    tiles: list[list[int]] = []
    for place in range(places):
        own = [token for token, owner in enumerate(owners) if owner == place]
        for first in range(0, len(own), ROWS):
            begin = len(tokens) + first
            tiles.append([place, begin, min(begin + ROWS, len(tokens) + len(own))])
        tokens += own
    room = most_tiles(len(owners), places)
    assert len(tiles) <= room
    tiles += [[-1, 0, 0]] * (room + 2 - len(tiles))
    tokens += [0] * (len(owners) - len(tokens))
    return Tiles(*(torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (tiles, tokens)))


def check(
    owners: Sequence[int],
    inputs: int,
    outputs: Sequence[int],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`ranks` are those of each adapter's parts; returns what the kernels have made."""
    adapters = [adapter(inputs, outputs, own, seed, dtype) for seed, own in enumerate(ranks)]
    random = torch.Generator().manual_seed(9)
    x = torch.randn(len(owners), inputs, generator=random).to(DEVICE, dtype)
    out = torch.randn(len(owners), sum(outputs), generator=random).to(DEVICE, dtype)
    before = out.clone()
    most = sum(padded(max(own[part] for own in ranks)) for part in range(len(outputs)))
    add_updates(x, out, placed(adapters, dtype), gathered(owners, len(adapters)), PRODUCT, most)
    cpu = [None if owner < 0 else adapters[owner] for owner in owners]
    assert_close(out, reference(x.cpu(), before.cpu(), cpu), dtype)
    untouched = [token for token, owner in enumerate(owners) if owner < 0]
    assert torch.equal(out[untouched], before[untouched])
    return out.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mix_of_ranks_and_plain_tokens_equals_the_reference(dtype: torch.dtype) -> None:
    check([1, -1, 0, 2, 2, -1, 1, 2], 160, (80, 20, 20), [(4, 4, 4), (16, 0, 20), (0, 7, 0)], dtype)


def test_products_of_programs_that_share_inputs_equal_the_reference() -> None:
    assert splits_of(1100) == 2
    check([0, 1, 0], 1100, (70,), [(8,), (24,)])


def test_more_tokens_of_an_adapter_than_a_tile_has_are_right() -> None:
    check([0] * 21 + [1] + [0] * 14, 40, (33,), [(8,), (3,)])


def test_a_step_without_adapters_changes_nothing() -> None:
    check([-1] * 5, 64, (64,), [(8,)])


def test_a_token_has_the_bits_that_it_has_alone() -> None:
    owners = [0, 1, 1, -1, 0, 1]
    ranks = [(20, 5), (3, 18)]
    together = check(owners, 600, (50, 90), ranks)
    for token, owner in enumerate(owners):
        alone = [owner if place == token else -1 for place in range(len(owners))]
        assert torch.equal(check(alone, 600, (50, 90), ranks)[token], together[token])


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-1, 3), min_size=1, max_size=40),
    st.integers(1, 300),
    st.lists(st.integers(1, 90), min_size=1, max_size=PARTS),
    st.lists(st.lists(st.integers(0, 40), min_size=PARTS, max_size=PARTS), min_size=4, max_size=4),
)
def test_any_shape_equals_the_reference(
    owners: list[int], inputs: int, outputs: list[int], ranks: list[list[int]]
) -> None:
    cut = [own[: len(outputs)] for own in ranks]
    if any(any(own) for own in cut):
        check(owners, inputs, outputs, cut)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=9))
def test_there_is_room_for_the_tiles_of_any_mix(counts: list[int]) -> None:
    tokens = sum(counts)
    if tokens:
        assert sum(-(-count // ROWS) for count in counts) <= most_tiles(tokens, len(counts)) <= tokens
