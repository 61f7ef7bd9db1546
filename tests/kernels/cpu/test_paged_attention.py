"""Paged attention against plain attention in float64, over blocks in any order, with poison in all others."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.attention_layer import Attention
from pagewire.kernels.cpu.kernels import CpuKernels, batches_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.int8: 1e-3}
"""Allowed error of a result, by the dtype of the pool, whose own rounding the reference shares.

int8: queries and weights are rounded to 15 bits. That moves a score by at most scale * sum(|key|) * max(|query|) /
65534, which is below 7e-4 for normal numbers in 256 dimensions, and a result by that times the spread of the values;
signs cancel, and 2e-4 is the most that 1,500 random cases have shown. A wrong code of a value is off by 2e-2 times its
weight.
"""
NAN = {torch.int8: -1}
"""Number that fills a pool so that all of its floats are NaN."""


class Row(NamedTuple):
    """Positions [start, start + width) of a sequence whose earlier keys and values are in the pool."""

    start: int
    width: int


class Heads(NamedTuple):
    """Shape of an attention."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    scale: float = 0.0
    value_dim: int = 0
    sinks: bool = False

    @property
    def layer(self) -> Attention:
        return Attention(
            self.heads,
            self.kv_heads,
            self.dim,
            self.scale or self.dim**-0.5,
            self.window,
            self.chunk,
            self.soft_cap,
            value_size=self.value_dim,
        )


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., D] in int8 of a float32 tensor, and the scale [..., 1] of each row."""
    largest = x.abs().amax(-1, keepdim=True)
    factors = torch.full_like(largest, 127) / largest  # `127 / largest` multiplies by a rounded reciprocal
    return torch.round(x * factors).to(torch.int8), largest / 127


class Case:
    """Random rows. Every number of the pool that no row owns is NaN, or for int8 has a scale that is."""

    def __init__(self, kernels: CpuKernels, rows: list[Row], heads: Heads, dtype: torch.dtype, seed: int = 0) -> None:
        self.kernels, self.rows, self.heads, self.dtype = kernels, rows, heads, dtype
        self.random = np.random.default_rng(seed)
        ends = [row.start + row.width for row in rows]
        needs = [-(-end // heads.block_size) for end in ends]
        self.keys = [self._normal(end, heads.kv_heads, heads.dim) for end in ends]
        self.values = [self._normal(end, heads.kv_heads, heads.layer.value_head_size) for end in ends]
        self.sinks = self._normal(heads.heads) if heads.sinks else None
        self.queries = [self._normal(row.width, heads.heads, heads.dim) for row in rows]
        blocks = sum(needs) + 2
        free = self.random.permutation(blocks).tolist()
        self.slots = self.random.permutation(len(rows) + 1)[: len(rows)]
        self.tables = np.full((len(rows) + 1, max(needs)), 1 << 40)  # an entry that is not a slot's own would crash
        for slot, need in zip(self.slots, needs, strict=True):
            self.tables[slot, :need] = [free.pop() for _ in range(need)]
        shapes = kernels.pool_shapes(blocks, heads.layer, heads.block_size, dtype)
        self.pool = tuple(torch.full(shape, NAN.get(dtype, math.nan), dtype=dtype) for shape in shapes)
        for index, row in enumerate(rows):
            for position in range(row.start):
                self._write(index, position)

    def _normal(self, *shape: int) -> Tensor:
        exact = torch.float32 if self.dtype == torch.int8 else self.dtype
        return torch.from_numpy(self.random.normal(0, 1, shape)).to(exact).float()

    def _write(self, index: int, position: int) -> None:
        """Writes a key and a value to the pool, as `CpuKernels.pool_shapes` says."""
        heads, together = self.heads, self.pool[0].shape[-1]
        block = self.tables[self.slots[index], position // heads.block_size]
        at = position % heads.block_size
        key, value = self.keys[index][position], self.values[index][position]
        if self.dtype == torch.int8:
            (key, key_scales), (value, value_scales) = rounded(key), rounded(value)
            stored = self.pool[0].flatten(2)[block, :, -8 * heads.block_size :].view(heads.kv_heads, 2, -1, 4)
            stored[:, 0, at], stored[:, 1, at] = key_scales.view(torch.int8), value_scales.view(torch.int8)
        pairs = F.pad(key, (0, -heads.dim % together)).view(heads.kv_heads, -1, together)
        self.pool[0][block, :, : pairs.shape[1], at] = pairs
        self.pool[1][block, :, at // together, : value.shape[1], at % together] = value

    @property
    def scales(self) -> Tensor:
        """A copy [blocks, Hkv, 2, block size] of the float32 scales of keys, and of values, of a pool in int8."""
        stored = self.pool[0].flatten(2)[:, :, -8 * self.heads.block_size :].clone()
        return stored.view(torch.float32).view(*stored.shape[:2], 2, -1)

    def stored(self, x: Tensor) -> Tensor:
        """Float64 keys or values as they are stored."""
        if self.dtype != torch.int8:
            return x.double()
        codes, scales = rounded(x)
        return codes.double() * scales.double()

    def run(self, kernels: CpuKernels | None = None) -> list[Tensor]:
        """The kernel's result for each row."""
        rows = self.rows
        num_computed_tokens = np.array([row.start for row in rows])
        query_lens = np.array([row.width for row in rows])
        new = [
            torch.cat([part[row.start :] for part, row in zip(parts, rows, strict=True)])
            for parts in (self.keys, self.values)
        ]
        parts = [part.flatten(1) for part in (torch.cat(self.queries), *new)]
        joined = torch.cat(parts, dim=1)  # as a projection leaves them: one beside the other
        split = torch.split(joined, [part.shape[1] for part in parts], dim=1)
        q, k, v = (
            part.view(len(part), count, part.shape[1] // count)
            for part, count in zip(split, (self.heads.heads, self.heads.kv_heads, self.heads.kv_heads), strict=True)
        )
        (batch,) = batches_of(self.slots, num_computed_tokens, query_lens, self.tables[None])
        out = (kernels or self.kernels).attend(batch, self.heads.layer, self.pool, q, k, v, self.sinks)
        return list(torch.split(out, query_lens.tolist()))

    def check(self) -> None:
        for index, out in enumerate(self.run()):
            torch.testing.assert_close(out.double(), self.expected(index), rtol=0, atol=TOLERANCE[self.dtype])

    def expected(self, index: int) -> Tensor:
        start, width = self.rows[index]
        group = self.heads.heads // self.heads.kv_heads
        keys, values = (self.stored(part[index]).repeat_interleave(group, 1) for part in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", self.queries[index].double(), keys) * self.heads.layer.scale
        if cap := self.heads.soft_cap:
            scores = cap * torch.tanh(scores / cap)
        query = torch.arange(start, start + width)[:, None]
        key = torch.arange(start + width)
        hidden = (key > query) | (key <= query - self.heads.window if self.heads.window else key < 0)
        if chunk := self.heads.chunk:
            hidden |= key < query // chunk * chunk
        scores = scores.masked_fill(hidden, -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, width, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : start + width]
        return torch.einsum("hqk,khd->qhd", weights, values)


shapes = st.builds(
    lambda kv_heads, group, dim, block_size, window: Heads(kv_heads * group, kv_heads, dim, block_size, window),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([8, 16, 17, 20, 64, 80]),
    st.sampled_from([1, 8, 16, 24, 32]),
    st.sampled_from([0, 0, 1, 7, 40]),
)
rows = st.builds(Row, st.one_of(st.integers(0, 40), st.integers(200, 600)), st.one_of(st.just(1), st.integers(1, 60)))


@settings(max_examples=60, deadline=None)
@example([Row(0, 40)], Heads(6, 3, 80, 1), torch.int8, 26)  # a value lies within 1e-6 of a tie between two codes
@given(
    rows=st.lists(rows, min_size=1, max_size=5),
    heads=shapes,
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
)
def test_ragged_rows_equal_the_reference(
    kernels: CpuKernels, rows: list[Row], heads: Heads, dtype: torch.dtype, seed: int
) -> None:
    Case(kernels, rows, heads, dtype, seed).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_every_head_size_equals_the_reference(kernels: CpuKernels, dim: int, dtype: torch.dtype) -> None:
    rows = [Row(0, 33), Row(700, 1), Row(256, 1), Row(255, 2), Row(0, 1)]
    Case(kernels, rows, Heads(4, 2, dim, 16), dtype).check()
    Case(kernels, rows, Heads(4, 2, dim, 16, window=100), dtype).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options",
    [{"soft_cap": 2.0}, {"sinks": True}, {"value_dim": 24}, {"value_dim": 72}, {"chunk": 48}, {"scale": 0.4}],
    ids=str,
)
def test_options_of_other_families_equal_the_reference(
    kernels: CpuKernels, options: dict[str, Any], dtype: torch.dtype
) -> None:
    rows = [Row(0, 33), Row(700, 1), Row(256, 1), Row(255, 2), Row(90, 20)]
    Case(kernels, rows, Heads(4, 2, 40, 16, **options), dtype).check()


def test_more_query_heads_than_a_tile_holds_equal_the_reference(kernels: CpuKernels) -> None:
    Case(kernels, [Row(30, 3), Row(300, 1)], Heads(71, 1, 16, 16), torch.float32).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_context_that_threads_share_equals_the_reference(many_threads: CpuKernels, dtype: torch.dtype) -> None:
    case = Case(many_threads, [Row(3000, 1)], Heads(3, 1, 64, 16), dtype)
    case.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_number_of_threads_changes_no_bit(
    kernels: CpuKernels, many_threads: CpuKernels, dtype: torch.dtype
) -> None:
    case = Case(kernels, [Row(2000, 1), Row(500, 40), Row(0, 7)], Heads(6, 2, 64, 16), dtype)
    one, many = case.run(), case.run(many_threads)
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


@settings(max_examples=20, deadline=None)
@given(
    cut=st.integers(1, 99),
    others=st.lists(rows, max_size=3),
    heads=shapes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_neighbours_and_chunks_change_no_bit(
    kernels: CpuKernels, cut: int, others: list[Row], heads: Heads, dtype: torch.dtype
) -> None:
    whole = Case(kernels, [Row(300, 100)], heads, dtype)
    expected = whole.run()[0]
    part = Case(kernels, [Row(300 + cut, 100 - cut), *others], heads, dtype, seed=1)
    own = part.slots[0]
    for to, source in zip(part.pool, whole.pool, strict=True):
        used = part.tables[own][: -(-400 // heads.block_size)]
        to[used] = source[whole.tables[whole.slots[0]]]
    part.queries[0], part.keys[0], part.values[0] = whole.queries[0][cut:], whole.keys[0], whole.values[0]
    assert torch.equal(part.run()[0], expected[cut:])


def test_large_scores_do_not_overflow(kernels: CpuKernels) -> None:
    case = Case(kernels, [Row(50, 5)], Heads(2, 1, 16, 16), torch.float32)
    case.queries[0] *= 1e4
    case.check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("end", [49, 50])
def test_the_next_step_reads_written_keys_and_values(kernels: CpuKernels, end: int, dtype: torch.dtype) -> None:
    heads = Heads(4, 2, 32, 16)
    case = Case(kernels, [Row(0, end)], heads, dtype)
    whole = case.run()[0]
    case.rows = [Row(end - 1, 1)]
    case.queries = [case.queries[0][end - 1 :]]
    assert torch.equal(case.run()[0], whole[end - 1 :])
    stored: npt.NDArray[np.int64] = case.tables[case.slots[0]]
    if dtype == torch.int8:
        assert not case.scales[stored[:3]].isnan().any()
        assert case.scales[stored[3], :, :, 2:].isnan().all(), "written beyond the row's last position"
    else:
        assert not case.pool[1][stored[:3], :, :, : heads.dim].isnan().any()
        assert case.pool[0][stored[3], :, :, 2:].isnan().all(), "written beyond the row's last position"
