"""Joining splits: a weighted mean that forgets nothing and invents nothing."""

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.attention.join_splits import join_splits
from pagewire.kernels.triton.jit import jit
from tests.kernels.triton.batches import DEVICE, assert_close, int32
from tests.kernels.triton.references.join_splits import reference

HEADS, SIZE = 6, 24
GROUP = 3


@jit
def join_all_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    logsum: tl.tensor,
    cu_splits: tl.tensor,
    cu_queries: tl.tensor,
    LIMIT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program: a row and a KV head, as the last programs of decode attention join its first and last queries."""
    row = tl.program_id(0)
    begin, first = tl.load(cu_splits + row), tl.load(cu_queries + row)
    splits, queries = tl.load(cu_splits + row + 1) - begin, tl.load(cu_queries + row + 1) - first
    if splits > 1:
        half = queries // 2
        join_splits(
            out, partial, logsum, begin, splits, first, 0, half, LIMIT, tl.program_id(1),
            KV_HEADS, GROUP, SIZE, PADDED, TILE,
        )  # fmt: skip
        join_splits(
            out, partial, logsum, begin, splits, first, half, queries, LIMIT, tl.program_id(1),
            KV_HEADS, GROUP, SIZE, PADDED, TILE,
        )  # fmt: skip


def case(splits: list[int], queries: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    items, limit = sum(splits) + 2, max(queries) + 1
    partial = torch.randn(items, limit, HEADS, SIZE, generator=random).to(DEVICE)
    logsum = (torch.randn(items, limit, HEADS, generator=random) * 20).to(DEVICE)
    cu = [int32([0, *counts]).cumsum(0).int() for counts in (splits, queries)]
    out = torch.full((sum(queries) + 1, HEADS, SIZE), torch.nan, device=DEVICE)
    return partial, logsum, *cu, out


def check(arguments: tuple[torch.Tensor, ...], tile: int = 4) -> torch.Tensor:
    partial, logsum, cu_splits, cu_queries, out = arguments
    expected = reference(*(tensor.cpu() for tensor in arguments))
    join_all_kernel[len(cu_splits) - 1, HEADS // GROUP](
        out, partial, logsum, cu_splits, cu_queries,
        LIMIT=partial.shape[1], KV_HEADS=HEADS // GROUP, GROUP=GROUP, SIZE=SIZE, PADDED=32, TILE=tile,
    )  # fmt: skip
    assert out.isnan().equal(expected.isnan().to(DEVICE)), "only shared rows are written"
    assert_close(out.nan_to_num(), expected.nan_to_num(), torch.float32)
    return out


def test_rows_of_one_split_are_untouched() -> None:
    out = check(case([1, 3, 0, 2], [1, 1, 0, 1]))
    assert out[0].isnan().all()
    assert not out[1:3].isnan().any()


@pytest.mark.parametrize("tile", [1, 16])
def test_more_splits_than_a_tile_has_are_joined(tile: int) -> None:
    check(case([40, 17], [1, 2]), tile)


def test_a_split_that_saw_nothing_has_no_weight() -> None:
    arguments = case([3], [1])
    arguments[1][1] = float("-inf")
    arguments[0][1] = 1e30
    out = check(arguments)
    assert out[0].abs().max() < 10


def test_all_splits_empty_is_zero() -> None:
    arguments = case([2], [1])
    arguments[1].fill_(float("-inf"))
    out = check(arguments)
    assert (out[0] == 0).all()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=4), st.integers(0, 999))
def test_any_plan_equals_the_reference(rows: list[tuple[int, int]], seed: int) -> None:
    splits, queries = [row[0] for row in rows], [row[1] for row in rows]
    check(case(splits, [*queries[:-1], max(1, queries[-1])], seed))
