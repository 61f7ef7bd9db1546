"""Split attention, planned and reduced, against the float64 reference of attention."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.attention_layer import Attention
from pagewire.kernels.triton.attention.decode_attention import (
    SplitPlan,
    most_queries,
    new_plan,
    plan_batch,
    split_attention,
)
from pagewire.kernels.triton.attention.paged_attention import paged_attention
from tests.kernels.triton.batches import DEVICE, Case, assert_close, int32, paged_case, poisoned
from tests.kernels.triton.references.paged_attention import reference


def layer(heads: int = 4, kv_heads: int = 2, head_size: int = 32, **options: Any) -> Attention:
    return Attention(heads, kv_heads, head_size, 1 / math.sqrt(head_size), **options)


def planned(shape: Attention, case: Case, room: int, queries: int = 1) -> SplitPlan:
    plan = new_plan(shape, len(case.batch.slots), room, DEVICE, case.query.dtype, case.key_cache.dtype, queries)
    plan.partial.fill_(torch.nan)
    plan.logsum.fill_(torch.nan)
    plan_batch(shape, case.batch, plan, plan.parts)
    return plan


def check(
    shape: Attention,
    case: Case,
    room: int = 6,
    sinks: torch.Tensor | None = None,
    queries: int = 1,
) -> SplitPlan:
    """Expects of rows with few queries what the reference says; a plan allows `queries` at least."""
    plan = planned(shape, case, room, queries)
    out = case.poisoned()
    split_attention(shape, case.batch, plan, case.query, case.key_cache, case.value_cache, out, sinks, plan.parts)
    expected = reference(shape, case.batch, case.query, case.key_cache, case.value_cache, sinks)
    short = torch.zeros(len(case.query), dtype=torch.bool)
    for first, last in case.batch.cu_queries.cpu().unfold(0, 2, 1).tolist():
        short[first:last] = last - first <= most_queries(shape, plan.parts)
    written = out.cpu()[short]
    assert_close(written, expected[short[: case.live]], case.query.dtype)
    assert not plan.counters.any(), "the next layer counts from 0"
    assert out.cpu()[~short].isnan().all(), "a row of too many queries, or of none, was written"
    return plan


DECODES = [(1, 300), (1, 0), (1, 17), (0, 0), (1, 1), (1, 90)]


def test_only_long_contexts_are_split() -> None:
    plan = check(layer(), paged_case(layer(), DECODES, padding=3))
    assert plan.cu_splits.diff()[0] > 1, "the long context is shared"
    assert plan.cu_splits.diff()[4] == 1, "the short one is not"


@pytest.mark.parametrize("room", [1, 2, 24])
def test_few_and_many_splits_equal_the_reference(room: int) -> None:
    check(layer(), paged_case(layer(), [(1, 200), (1, 33)]), room)


def test_verify_tokens_see_no_later_draft() -> None:
    shape = layer(4, 1)
    check(shape, paged_case(shape, [(4, 130), (2, 65), (1, 64), (3, 3)]))


@pytest.mark.parametrize("options", [{}, {"window": 40}])
def test_several_programs_compute_the_queries_of_a_row_with_many_drafts(options: dict[str, Any]) -> None:
    shape = layer(8, 1, **options)
    sinks = torch.linspace(-1, 2, 8, device=DEVICE)
    plan = check(shape, paged_case(shape, [(5, 130), (1, 65), (6, 6), (7, 90), (2, 300)]), sinks=sinks, queries=5)
    assert plan.parts == 3, "of two queries each"
    assert plan.cu_splits.diff().tolist()[3] == 0, "seven are too many"
    assert plan.cu_splits.diff()[4] > 1


def test_longer_rows_are_left_to_the_mixed_kernel() -> None:
    shape = layer(8, 1)
    case = paged_case(shape, [(1, 90), (12, 100), (2, 70), (3, 3)])
    check(shape, case)
    out = poisoned(case.query)
    inputs = (case.query, case.key_cache, case.value_cache, out)
    split_attention(shape, case.batch, planned(shape, case, 6), *inputs)
    paged_attention(shape, case.batch, *inputs, minimum=most_queries(shape) + 1)
    expected = reference(shape, case.batch, case.query, case.key_cache, case.value_cache)
    assert_close(out, expected, torch.float32)


def test_sinks_and_values_of_another_size_equal_the_reference() -> None:
    shape = layer(4, 2, window=20, value_size=24)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 100.0], device=DEVICE)
    check(shape, paged_case(shape, [(1, 300), (2, 75), (1, 1)]), sinks=sinks)
    check(layer(value_size=40), paged_case(layer(value_size=40), DECODES), sinks=sinks)


@pytest.mark.parametrize("options", [{"window": 20}, {"window": 1}, {"soft_cap": 3.0}])
def test_window_and_soft_cap_equal_the_reference(options: dict[str, Any]) -> None:
    check(layer(**options), paged_case(layer(**options), [(1, 100), (2, 75), (1, 5)]))


def test_a_window_over_many_splits_equals_the_reference() -> None:
    shape = layer(window=150)
    plan = check(shape, paged_case(shape, [(1, 300), (3, 301)]), 8)
    assert (plan.cu_splits.diff() > 1).all()


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(3, 3, 80), (5, 1, 64), (17, 1, 96), (2, 2, 256)])
def test_every_shape_of_heads_equals_the_reference(heads: int, kv_heads: int, head_size: int) -> None:
    shape = layer(heads, kv_heads, head_size)
    check(shape, paged_case(shape, [(1, 80), (1, 40)]))


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_half_precision_equals_the_reference(cache: torch.dtype) -> None:
    check(layer(), paged_case(layer(), [(1, 200), (1, 30)], dtype=torch.bfloat16, cache_dtype=cache))


def test_padded_rows_of_a_graph_cost_nothing_and_write_nothing() -> None:
    case = paged_case(layer(), [(1, 60), (1, 40)] + [(0, 0)] * 6, padding=6)
    plan = check(layer(), case)
    assert (plan.cu_splits[2:] == plan.cu_splits[2]).all()


def test_splits_of_a_plan_are_read_from_the_device() -> None:
    """The launch is the same whatever the plan says, so a captured graph follows new lengths."""
    case = paged_case(layer(), [(1, 120)])
    results = []
    for splits, size in ((1, 8), (2, 4), (3, 3), (8, 1)):
        plan = new_plan(layer(), 1, 8, DEVICE, torch.float32, torch.float32)
        plan.item_rows[:splits] = 0
        plan.cu_splits.copy_(int32([0, splits]))
        plan.split_size.fill_(size)
        out = poisoned(case.query)
        split_attention(layer(), case.batch, plan, case.query, case.key_cache, case.value_cache, out)
        results.append(out)
    for result in results[1:]:
        assert_close(result, results[0], torch.float32)


rows = st.lists(
    st.integers(0, 3).flatmap(lambda queries: st.tuples(st.just(queries), st.integers(queries, 90))), max_size=4
)


@settings(max_examples=8, deadline=None)
@given(rows, st.sampled_from([0, 1, 25]), st.sampled_from([16, 48]), st.sampled_from([1, 5, 40]), st.integers(0, 999))
def test_any_batch_equals_the_reference(
    batch: list[tuple[int, int]], window: int, block_size: int, room: int, seed: int
) -> None:
    shape = layer(4, 2, 16, window=window)
    check(shape, paged_case(shape, batch or [(0, 0)], seed=seed, block_size=block_size), room)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 120, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"soft_cap": 20.0}])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (5, 1), (8, 2)])
def test_every_combination_of_options_equals_the_reference(
    dtype: torch.dtype, head_size: int, options: dict[str, Any], heads: int, kv_heads: int
) -> None:
    shape = layer(heads, kv_heads, head_size, **options)
    case = paged_case(shape, [(1, 400), (0, 0), (3, 164), (1, 1)], dtype=dtype, padding=3)
    check(shape, case, 12)
