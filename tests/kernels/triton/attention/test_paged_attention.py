"""The mixed attention kernel against its float64 reference."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.attention_layer import Attention
from pagewire.kernels.triton.attention.paged_attention import paged_attention
from tests.kernels.triton.batches import DEVICE, Case, assert_close, paged_case, poisoned
from tests.kernels.triton.references.paged_attention import reference


def check(layer: Attention, case: Case, sinks: torch.Tensor | None = None) -> None:
    out = case.poisoned()
    paged_attention(layer, case.batch, case.query, case.key_cache, case.value_cache, out, sinks=sinks)
    expected = reference(layer, case.batch, case.query, case.key_cache, case.value_cache, sinks)
    assert_close(out[: case.live], expected, case.query.dtype)
    assert out[case.live :].isnan().all(), "a token outside every sequence was written"


def layer(heads: int = 4, kv_heads: int = 2, head_size: int = 64, **options: Any) -> Attention:
    return Attention(heads, kv_heads, head_size, 1 / math.sqrt(head_size), **options)


MIXED = [(1, 37), (0, 5), (20, 20), (1, 1), (7, 40), (3, 19), (0, 0), (1, 16)]


def test_a_mixed_batch_equals_the_reference() -> None:
    check(layer(), paged_case(layer(), MIXED, padding=5))


@pytest.mark.parametrize("options", [{"window": 5}, {"soft_cap": 3.0}, {"window": 17, "soft_cap": 5.0}])
def test_window_and_soft_cap_equal_the_reference(options: dict[str, Any]) -> None:
    check(layer(**options), paged_case(layer(**options), MIXED))


@pytest.mark.parametrize("options", [{"chunk": 8}, {"chunk": 20}, {"value_size": 24}, {"value_size": 80}])
def test_chunks_and_values_of_another_size_equal_the_reference(options: dict[str, Any]) -> None:
    check(layer(**options), paged_case(layer(**options), MIXED))


@pytest.mark.parametrize("options", [{}, {"window": 5}])
def test_sinks_equal_the_reference(options: dict[str, Any]) -> None:
    sinks = torch.tensor([-1.0, 0.0, 2.0, 100.0], device=DEVICE)
    check(layer(**options), paged_case(layer(**options), MIXED), sinks=sinks)


@pytest.mark.parametrize("head_size", [80, 96, 112, 120, 128, 256])
def test_every_head_size_equals_the_reference(head_size: int) -> None:
    shape = layer(2, 1, head_size)
    check(shape, paged_case(shape, [(3, 21), (1, 18)]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (5, 1), (7, 1), (16, 1), (20, 1), (6, 2)])
def test_grouped_heads_equal_the_reference(heads: int, kv_heads: int) -> None:
    shape = layer(heads, kv_heads)
    check(shape, paged_case(shape, [(4, 23), (1, 9), (18, 18)]))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_every_block_size_equals_the_reference(block_size: int) -> None:
    check(layer(), paged_case(layer(), [(2, 70), (1, 33), (5, 64)], block_size=block_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_reference(dtype: torch.dtype) -> None:
    check(layer(), paged_case(layer(), [(1, 70), (9, 130)], dtype=dtype))


def test_an_fp8_cache_equals_the_reference() -> None:
    case = paged_case(layer(), [(1, 40), (6, 70)], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    check(layer(), case)


def test_offsets_beyond_32_bits_do_not_overflow() -> None:
    """A block number times a block's elements passes 2**31; only the pages that are touched take memory."""
    shape = layer(1, 1, 128)
    case = paged_case(shape, [(1, 10)])
    blocks = 2**31 // (16 * 128) + 8
    far = torch.empty(2, blocks, 1, 16, 128, dtype=torch.float32, device=DEVICE)
    near = int(case.batch.block_tables[case.batch.slots[0], 0])
    far[0, -1], far[1, -1] = case.key_cache[near], case.value_cache[near]
    case.batch.block_tables[case.batch.slots[0], 0] = blocks - 1
    case.key_cache, case.value_cache = far[0], far[1]
    check(shape, case)


def test_short_rows_are_left_to_the_split_kernel() -> None:
    case = paged_case(layer(), MIXED)
    out = poisoned(case.query)
    paged_attention(layer(), case.batch, case.query, case.key_cache, case.value_cache, out, minimum=4)
    expected = reference(layer(), case.batch, case.query, case.key_cache, case.value_cache)
    for row, (count, _) in enumerate(MIXED):
        tokens = slice(*case.batch.cu_queries[row : row + 2].tolist())
        if count >= 4:
            assert_close(out[tokens], expected[tokens], torch.float32)
        else:
            assert out[tokens].isnan().all()


def test_dead_row_gives_zeros() -> None:
    case = paged_case(layer(), [(1, 4), (1, 0), (1, 9)])
    out = poisoned(case.query)
    paged_attention(layer(), case.batch, case.query, case.key_cache, case.value_cache, out)
    assert (out[1] == 0).all()
    assert not out.isnan().any()


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Equal to the bit, alone or among others: what `--batch-invariant` rests on."""
    together = paged_case(layer(), MIXED, seed=4)
    out = poisoned(together.query)
    paged_attention(layer(), together.batch, together.query, together.key_cache, together.value_cache, out)
    row = 4
    tokens = slice(*together.batch.cu_queries[row : row + 2].tolist())
    alone = together.query[tokens].contiguous()
    batch = type(together.batch)(
        together.batch.slots[row : row + 1],
        together.batch.lengths[row : row + 1],
        torch.tensor([0, len(alone)], dtype=torch.int32, device=DEVICE),
        together.batch.block_tables,
    )
    single = poisoned(alone)
    paged_attention(layer(), batch, alone, together.key_cache, together.value_cache, single)
    assert torch.equal(single, out[tokens])


rows = st.lists(
    st.integers(0, 9).flatmap(lambda queries: st.tuples(st.just(queries), st.integers(queries, 40))), max_size=5
)


@settings(max_examples=8, deadline=None)
@given(rows, st.sampled_from([0, 1, 6]), st.sampled_from([0.0, 2.0]), st.sampled_from([16, 48]), st.integers(0, 999))
def test_any_ragged_batch_equals_the_reference(
    batch: list[tuple[int, int]], window: int, soft_cap: float, block_size: int, seed: int
) -> None:
    shape = layer(4, 2, 16, window=window, soft_cap=soft_cap)
    check(shape, paged_case(shape, batch or [(0, 0)], seed=seed, block_size=block_size))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 120, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"window": 33}, {"soft_cap": 20.0}, {"window": 100, "soft_cap": 30.0}])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (5, 1), (8, 2)])
def test_every_combination_of_options_equals_the_reference(
    dtype: torch.dtype, head_size: int, options: dict[str, Any], heads: int, kv_heads: int
) -> None:
    shape = layer(heads, kv_heads, head_size, **options)
    case = paged_case(shape, [(1, 200), (40, 170), (0, 0), (4, 64), (1, 1)], dtype=dtype, padding=3)
    check(shape, case)
