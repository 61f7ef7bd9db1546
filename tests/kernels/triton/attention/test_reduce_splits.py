"""Joining splits: a weighted mean that forgets nothing and invents nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.attention import reduce_splits as reduce_splits_module
from pagewire.kernels.triton.attention.reduce_splits import reduce_splits, reference
from tests.kernels.triton.batches import DEVICE, assert_close, int32


def case(splits: list[int], queries: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    items, limit = sum(splits) + 2, max(queries) + 1
    partial = torch.randn(items, limit, 3, 24, generator=random).to(DEVICE)
    logsum = (torch.randn(items, limit, 3, generator=random) * 20).to(DEVICE)
    cu = [int32([0, *counts]).cumsum(0).int() for counts in (splits, queries)]
    out = torch.full((sum(queries) + 1, 3, 24), torch.nan, device=DEVICE)
    return partial, logsum, *cu, out


def check(arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
    partial, logsum, cu_splits, cu_queries, out = arguments
    expected = reference(*(tensor.cpu() for tensor in arguments))
    reduce_splits(partial, logsum, cu_splits, cu_queries, out, 3)
    assert out.isnan().equal(expected.isnan().to(DEVICE)), "only shared rows are written"
    assert_close(out.nan_to_num(), expected.nan_to_num(), torch.float32)
    return out


def test_rows_of_one_split_are_untouched() -> None:
    out = check(case([1, 3, 0, 2], [1, 1, 0, 1]))
    assert out[0].isnan().all()
    assert not out[1:3].isnan().any()


def test_more_splits_than_one_tile() -> None:
    check(case([40, 17], [1, 2]))


def test_programs_of_several_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_splits_module, "FEW", 0)
    check(case([40, 17, 1, 2], [1, 2, 1, 3]))


def test_a_split_that_saw_nothing_has_no_weight() -> None:
    arguments = case([3], [1])
    arguments[1][1] = float("-inf")
    arguments[0][1] = 1e30
    out = check(arguments)
    assert out[0].abs().max() < 10


def test_all_splits_empty_is_zero() -> None:
    arguments = case([2], [1])
    arguments[1].fill_(float("-inf"))
    partial, logsum, cu_splits, cu_queries, out = arguments
    reduce_splits(partial, logsum, cu_splits, cu_queries, out, 3)
    assert (out[0] == 0).all()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=4), st.integers(0, 999))
def test_any_plan(rows: list[tuple[int, int]], seed: int) -> None:
    splits, queries = [row[0] for row in rows], [row[1] for row in rows]
    check(case(splits, [*queries[:-1], max(1, queries[-1])], seed))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not there")
def test_many_rows_have_fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    plain, grids = builder.set_grid_dim, []

    def set_grid_dim(*size: int) -> None:
        grids.append(size)
        plain(*size)

    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    check(case([3, 2], [1, 2]))
    monkeypatch.setattr(reduce_splits_module, "FEW", 5)
    check(case([3, 2], [1, 2]))
    assert grids == [(2, 3, 1), (2, 1, 1)]
