"""Queries turned, keys turned and stored, values stored; nothing else in the cache touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.attention.rotary_cache import Rotary, rotary_cache
from tests.kernels.triton.batches import DEVICE, assert_close, int32
from tests.kernels.triton.references.rotary_cache import reference

BLOCK_SIZE = 16
BLOCKS = 6


def check(
    layer: Rotary,
    places: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    normed: bool = False,
    seed: int = 0,
) -> None:
    random = torch.Generator().manual_seed(seed)
    tokens = len(places)
    width = (layer.heads + 2 * layer.kv_heads) * layer.head_size
    packed = torch.randn(tokens, width, generator=random).to(DEVICE, dtype)
    positions = torch.randint(0, 50, (tokens,), generator=random).int().to(DEVICE)
    table = torch.rand(50, layer.rotary, generator=random).to(DEVICE)
    weights = [(torch.rand(layer.head_size, generator=random) + 0.5).to(DEVICE, dtype) if normed else None] * 2
    stored = cache or dtype
    shape = (BLOCKS, layer.kv_heads, BLOCK_SIZE, layer.head_size)
    keys, values = (torch.full(shape, torch.nan, device=DEVICE).to(stored) for _ in range(2))
    query = torch.full((tokens, layer.heads, layer.head_size), torch.nan, dtype=dtype, device=DEVICE)
    where = torch.tensor(places, device=DEVICE)
    rotary_cache(layer, packed, positions, where, table, query, keys, values, *weights)

    q, k, v = reference(layer, packed, positions, table, *weights)
    if cache is not None:
        k, v = (part.float().to(cache).double() for part in (k, v))
    assert_close(query, q, dtype)
    rows = [(place // BLOCK_SIZE, place % BLOCK_SIZE) for place in places]
    for token, (block, offset) in enumerate(rows):
        written_k, written_v = keys[block, :, offset].double(), values[block, :, offset].double()
        assert_close(written_k, k[token], dtype)
        assert_close(written_v, v[token], dtype)
        keys[block, :, offset] = torch.nan
        values[block, :, offset] = torch.nan
    assert keys.float().isnan().all()
    assert values.float().isnan().all(), "a place that no token owns was written"


def test_a_ragged_batch_with_a_dead_row_equals_the_reference() -> None:
    check(Rotary(4, 2, 64, 64), [17, 18, 3, 95, 80])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_reference(dtype: torch.dtype) -> None:
    check(Rotary(4, 2, 64, 64), [1, 40], dtype=dtype)


@pytest.mark.parametrize(
    "layer",
    [
        Rotary(2, 2, 80, 32),
        Rotary(3, 1, 96, 96),
        Rotary(2, 1, 120, 120),
        Rotary(2, 2, 64, 0),
        Rotary(2, 1, 80, 20),
        Rotary(5, 1, 256, 128),
    ],
    ids=str,
)
def test_every_shape_equals_the_reference(layer: Rotary) -> None:
    check(layer, [5, 33, 64])


def test_norms_of_single_heads_equal_the_reference() -> None:
    check(Rotary(4, 2, 64, 64), [2, 50], normed=True)
    check(Rotary(4, 2, 80, 40), [2, 50], normed=True, dtype=torch.bfloat16)


def test_an_fp8_cache_equals_the_reference() -> None:
    check(Rotary(4, 2, 64, 0), [7, 20], cache=torch.float8_e4m3fn)


def test_numbers_beyond_fp8_become_its_largest() -> None:
    layer = Rotary(1, 1, 64, 0)
    packed = torch.full((1, 3 * 64), 7000.0, device=DEVICE)
    keys, values = (torch.zeros(1, 1, 16, 64, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    query = torch.empty(1, 1, 64, device=DEVICE)
    place = torch.tensor([0], device=DEVICE)
    rotary_cache(layer, packed, int32([0]), place, torch.empty(1, 0, device=DEVICE), query, keys, values)
    assert (keys[0, 0, 0].float() == 448).all()
    assert (values[0, 0, 0].float() == 448).all()


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(0, BLOCKS * BLOCK_SIZE - 1), min_size=1, max_size=5, unique=True),
    st.sampled_from([(1, 1), (6, 2), (7, 1)]),
    st.sampled_from([(32, 32), (40, 24), (48, 0)]),
    st.booleans(),
)
def test_any_layer_equals_the_reference(
    places: list[int], heads: tuple[int, int], sizes: tuple[int, int], normed: bool
) -> None:
    check(Rotary(*heads, *sizes), places, normed=normed)
