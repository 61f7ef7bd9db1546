"""The plan of split contexts: bounded, complete, and good where a fixed number of splits is not."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.attention.plan_splits import capacity, most_items, plan_splits
from tests.kernels.triton.batches import DEVICE, int32
from tests.kernels.triton.references.plan_splits import reference, split_tiles


def waves(tiles: list[int], size: int, room: int) -> float:
    """Time of a step in tiles, if every wave of `room` items takes as long as one item."""
    items = sum(-(-count // size) for count in tiles)
    return -(-items // room) * min(size, max(tiles))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300), st.integers(1, 264))
def test_a_plan_has_no_more_items_than_the_grid_holds(tiles: list[int], room: int) -> None:
    size = split_tiles(tiles, room)
    assert size >= 1
    assert sum(-(-count // size) for count in tiles) <= most_items(len(tiles), room)


def test_steps_stay_near_their_ideal_for_every_batch_size() -> None:
    """For long contexts on 132 multiprocessors a step counted in whole waves stays near its ideal."""
    room = capacity(132, 8)
    for rows in range(1, 257):
        tiles = [256] * rows  # 16384 positions
        ideal = sum(tiles) / room
        assert waves(tiles, split_tiles(tiles, room), room) <= 1.35 * ideal + 1, rows


def test_one_long_context_among_short_ones_is_shared() -> None:
    tiles = [4] * 31 + [1024]
    room = capacity(132, 8)
    size = split_tiles(tiles, room)
    assert size <= 64, "the long context would keep one program busy long after the others"


def test_the_capacity_is_at_least_one() -> None:
    assert capacity(1, 64) == 1
    assert capacity(132, 8) == 33


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 900)), min_size=1, max_size=9),
    st.sampled_from([1, 3, 33]),
    st.sampled_from([0, 70]),
    st.sampled_from([(4, 4), (2, 6)]),
)
def test_the_kernel_equals_the_reference(
    rows: list[tuple[int, int]], room: int, window: int, limits: tuple[int, int]
) -> None:
    lengths = int32([queries + cached if cached else 0 for queries, cached in rows])
    cu_queries = int32([0] + [queries for queries, _ in rows]).cumsum(0).int()
    cu_splits, size = torch.full((len(rows) + 1,), -1, dtype=torch.int32, device=DEVICE), int32([-1])
    items = torch.full((most_items(len(rows), room),), -7, dtype=torch.int32, device=DEVICE)
    plan_splits(lengths, cu_queries, room, limits, 16, window, items, cu_splits, size)
    expected, expected_size = reference(lengths, cu_queries, room, limits, 16, window)
    owners = [row for row, splits in enumerate(expected.diff().tolist()) for _ in range(splits)]
    assert items.cpu().tolist() == owners + [-1] * (len(items) - len(owners))
    assert cu_splits.cpu().tolist() == expected.tolist()
    assert int(size) == expected_size
