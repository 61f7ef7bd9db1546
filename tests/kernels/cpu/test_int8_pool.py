"""A KV pool in int8: what is stored of a token, and what becomes of numbers that cannot be rounded."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels
from tests.kernels.cpu.test_paged_attention import Case, Heads, Row, rounded

HEADS = Heads(4, 2, 20, 16)


def case(kernels: CpuKernels, rows: list[Row], heads: Heads = HEADS, seed: int = 0) -> Case:
    return Case(kernels, rows, heads, torch.int8, seed)


def codes_of(layer_case: Case, block: int) -> tuple[Tensor, Tensor]:
    """The codes of a block, [block size, Hkv, D] of keys and of values."""
    heads, (keys, values) = layer_case.heads, layer_case.pool
    pairs = -(-heads.dim // 2)
    stored = keys[block, :, :pairs].permute(2, 0, 1, 3).flatten(2)[..., : heads.dim]
    return stored, values[block].permute(1, 3, 0, 2).flatten(0, 1)[: heads.block_size, :, : heads.layer.value_head_size]


@pytest.mark.parametrize(
    "heads",
    [HEADS, Heads(2, 1, 17, 5), Heads(3, 3, 64, 24, value_dim=40), Heads(1, 1, 8, 1), Heads(2, 2, 256, 32)],
    ids=str,
)
def test_every_token_has_its_own_codes_and_scales(kernels: CpuKernels, heads: Heads) -> None:
    layer_case = case(kernels, [Row(0, 70)], heads)
    layer_case.keys[0][3] *= 1e-3  # each token has a scale of its own
    layer_case.values[0][4] *= 1e5
    layer_case.run()
    for position in range(70):
        block, at = layer_case.tables[layer_case.slots[0]][position // heads.block_size], position % heads.block_size
        for kind, (codes, x) in enumerate(
            zip(codes_of(layer_case, block), (layer_case.keys[0], layer_case.values[0]), strict=True)
        ):
            expected, scales = rounded(x[position])
            assert torch.equal(codes[at], expected)
            assert torch.equal(layer_case.scales[block, :, kind, at], scales[:, 0])


def test_ties_are_rounded_to_even(kernels: CpuKernels) -> None:
    layer_case = case(kernels, [Row(0, 1)], Heads(1, 1, 8, 1))
    layer_case.keys[0][0, 0] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0])
    layer_case.run()
    keys, _ = codes_of(layer_case, layer_case.tables[layer_case.slots[0]][0])
    assert keys[0, 0].tolist() == [127, 0, 2, 2, 0, -2, -2, -127]


def test_a_token_is_written_once(kernels: CpuKernels) -> None:
    """The block that is begun keeps the bytes of its first tokens, whatever the next ones are."""
    layer_case = case(kernels, [Row(0, 20)])
    layer_case.run()
    before = [part.clone() for part in layer_case.pool]
    layer_case.rows = [Row(20, 1)]
    layer_case.keys[0], layer_case.values[0] = (
        torch.cat((part[0], part[0][:1] * 1e4)) for part in (layer_case.keys, layer_case.values)
    )
    layer_case.queries[0] = layer_case.queries[0][:1]
    layer_case.run()
    last = layer_case.tables[layer_case.slots[0]][1]
    for old, new in zip(before, layer_case.pool, strict=True):
        others = [block for block in range(len(old)) if block != last]
        assert torch.equal(old[others], new[others])
    assert (before[0][last] != layer_case.pool[0][last]).sum() <= HEADS.kv_heads * (HEADS.dim + 8)
    assert (before[1][last] != layer_case.pool[1][last]).sum() <= HEADS.kv_heads * layer_case.pool[1].shape[3]


@pytest.mark.parametrize("number", [math.nan, -math.inf])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("position", [5, 50, 61])
def test_numbers_that_are_not_finite_make_the_outputs_that_see_them_nan(
    kernels: CpuKernels, number: float, part: str, position: int
) -> None:
    heads = Heads(4, 2, 20, 16, window=40)
    clean, layer_case = (case(kernels, [Row(60, 1), Row(61, 1), Row(100, 1), Row(40, 30)], heads) for _ in range(2))
    for index, row in enumerate(layer_case.rows):
        if position < row.start + row.width:
            getattr(layer_case, part)[index][position, 1, 7] = number
        if position < row.start:
            layer_case._write(index, position)
    for row, result, expected in zip(layer_case.rows, layer_case.run(), clean.run(), strict=True):
        for query in range(row.width):
            seen = row.start + query - heads.window < position <= row.start + query
            assert torch.equal(result[query, :2], expected[query, :2]), "another KV head"
            assert result[query, 2:].isnan().all() if seen else torch.equal(result[query, 2:], expected[query, 2:])


def test_a_query_that_is_not_finite_makes_its_own_output_nan(kernels: CpuKernels) -> None:
    clean, layer_case = (case(kernels, [Row(30, 3)]) for _ in range(2))
    layer_case.queries[0][1, 2, 5] = math.inf
    (result,), (expected,) = layer_case.run(), clean.run()
    assert result[1, 2].isnan().all()
    result[1, 2] = expected[1, 2]
    assert torch.equal(result, expected)


@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-20, 1e30])
def test_extreme_values_are_no_special_case(kernels: CpuKernels, factor: float) -> None:
    layer_case = case(kernels, [Row(0, 40), Row(300, 1)])
    for index in range(2):
        layer_case.values[index] *= factor
        for position in range(layer_case.rows[index].start):
            layer_case._write(index, position)
    for index, out in enumerate(layer_case.run()):
        scaled = out.double() / factor if factor >= 1e-30 else out.double()
        expected = layer_case.expected(index) / factor if factor >= 1e-30 else torch.zeros_like(scaled)
        torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-3)


def test_a_small_value_with_a_large_weight_counts(kernels: CpuKernels) -> None:
    """As the first token of a text has: its weight is nearly 1, and its value is a hundredth of the others."""
    layer_case = case(kernels, [Row(200, 1)])
    layer_case.values[0][0] *= 0.01
    layer_case.keys[0][0] = layer_case.queries[0][0, ::2] * 4
    for position in range(200):
        layer_case._write(0, position)
    layer_case.check()


@pytest.mark.parametrize("block_size", [1, 16, 512, 1000])
def test_sums_of_large_codes_do_not_overflow(kernels: CpuKernels, block_size: int) -> None:
    """All codes are 127, all weights equal, and heads as wide as any."""
    layer_case = case(kernels, [Row(1200, 1)], Heads(1, 1, 512, block_size))
    for parts in (layer_case.queries, layer_case.keys, layer_case.values):
        parts[0].fill_(1.0)
    for position in range(1200):
        layer_case._write(0, position)
    torch.testing.assert_close(layer_case.run()[0], torch.ones(1, 1, 512), rtol=1e-3, atol=0)


@pytest.mark.parametrize("block_size", [1, 16])
def test_later_positions_of_a_chunk_change_no_bit(kernels: CpuKernels, block_size: int) -> None:
    """With small blocks, sums of a longer piece have less room in 32 bits."""
    layer_case = case(kernels, [Row(0, 100)], Heads(4, 2, 20, block_size))
    (expected,) = layer_case.run()
    layer_case.rows = [Row(97, 1)]
    for part in (layer_case.keys, layer_case.values):
        part[0] = part[0][:98]
    layer_case.queries[0] = layer_case.queries[0][97:98]
    assert torch.equal(layer_case.run()[0], expected[97:98])


def test_a_copy_of_the_blocks_gives_the_same_bits(kernels: CpuKernels) -> None:
    layer_case = case(kernels, [Row(100, 3)])
    (expected,) = layer_case.run()
    own = layer_case.tables[layer_case.slots[0]]
    targets = np.random.default_rng(1).permutation(len(own)) + len(layer_case.pool[0])
    layer_case.pool = tuple(
        torch.cat((part, part.new_full((len(own), *part.shape[1:]), 77))) for part in layer_case.pool
    )
    for part in layer_case.pool:
        part[targets] = part[own]
    layer_case.tables[layer_case.slots[0]] = targets
    assert torch.equal(layer_case.run()[0], expected)


def test_a_token_takes_its_codes_and_two_scales_per_head(kernels: CpuKernels) -> None:
    shapes = kernels.pool_shapes(1, Heads(3, 1, 64, 16).layer, 16, torch.int8)
    assert sum(math.prod(shape) for shape in shapes) == 16 * (64 + 64 + 4 + 4)
