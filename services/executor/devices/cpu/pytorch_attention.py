"""Paged attention on the CPU: gathers each row's blocks, then one fused attention per group of similar rows."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.devices.protocol import Int64, StepBatch
from pagewire.services.executor.models.model import ModelSpec


class KVCache:
    """The KV pool: per layer, keys [num_blocks, block_size, Hkv, d] and values [num_blocks, block_size, Hkv, dv].

    Attributes:
        layers: of each layer; those at the same place of their groups share them.
        groups: of the layers.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.block_size = block_size
        self.spec = spec.layers
        self.dtype = dtype
        self.groups = spec.groups
        pools = [
            (
                _zeros(dtype, num_blocks, block_size, layer.kv_heads, layer.head_size),
                _zeros(dtype, num_blocks, block_size, layer.kv_heads, layer.value_head_size),
            )
            for layer in (spec.layers[i] for i in self.groups.shared)
        ]
        self.layers = [pools[place] for place in self.groups.places]

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one block over all layers of a group."""
        layers = (spec.layers[i] for i in spec.groups.shared)
        numbers = sum(layer.kv_heads * (layer.head_size + layer.value_head_size) for layer in layers)
        return numbers * block_size * dtype.itemsize


def _zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns zeros. Memory of numpy's zeros is only taken where it is written.

    The pool must be zero: a masked position has the weight 0, and 0 times the NaN of an uninitialised block is NaN.
    """
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Group:
    """N rows of equal width W that are computed together, each attending to B blocks."""

    tokens: Tensor
    """[N * W] indices of the group's tokens in the batch."""
    blocks: Tensor
    """[N * B] block ids, row after row."""
    mask: Tensor
    """[N, 1, W, B * block_size], 0 where a query sees a key and -inf elsewhere."""


class PagedAttention:
    """The attention of one step, an `AttentionFn`."""

    def __init__(self, cache: KVCache, tables: Int64, batch: StepBatch, positions: Int64) -> None:
        """`tables` [groups, slots, blocks] are block tables, `positions` [T] the positions of the batch's tokens."""
        size = cache.block_size
        owners = np.repeat(batch.slots, batch.query_lens)
        self._cache = cache
        written = tables[:, owners, positions // size] * size + positions % size
        self._written = [torch.from_numpy(places) for places in written]
        begun = positions % size == 0
        self._begun = [torch.from_numpy(blocks) for blocks in tables[:, owners[begun], positions[begun] // size]]
        self._rows = {
            (bounds, group): list(_groups(batch, tables[group], size, bounds, cache.dtype))
            for bounds, group in set(zip(map(_bounds, cache.spec), cache.groups.groups, strict=True))
        }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionFn`."""
        keys, values = self._cache.layers[layer]
        table = self._cache.groups.groups[layer]
        if self._cache.dtype == torch.float16:
            # float16 overflows, and an infinity left in a block would spoil the next sequence that gets the block.
            k, v = k.nan_to_num(), v.nan_to_num()
        if len(self._begun[table]):
            # A hidden position has the weight 0, and 0 times a NaN of the block's last owner would be NaN.
            keys.index_fill_(0, self._begun[table], 0.0)
            values.index_fill_(0, self._begun[table], 0.0)
        keys.flatten(0, 1).index_copy_(0, self._written[table], k)
        values.flatten(0, 1).index_copy_(0, self._written[table], v)
        spec = self._cache.spec[layer]
        out = q.new_empty(*q.shape[:2], spec.value_head_size)
        attend = _attend
        if spec.soft_cap or sinks is not None:
            attend = functools.partial(_attend_by_parts, sinks=sinks)
        for group in self._rows[_bounds(spec), table]:
            out[group.tokens] = attend(spec, group, q[group.tokens], keys, values)
        return out


class Bounds(NamedTuple):
    """What a query sees; see `Attention` of the kernels."""

    window: int
    chunk: int

    def first(self, positions: Int64) -> Int64:
        """Returns the first position that a query at each of `positions` sees."""
        if self.chunk:
            return positions // self.chunk * self.chunk
        return np.maximum(positions - self.window + 1, 0) if self.window else np.zeros_like(positions)


def _bounds(layer: Attention) -> Bounds:
    return Bounds(layer.window, layer.chunk)


def _groups(batch: StepBatch, tables: Int64, size: int, bounds: Bounds, dtype: torch.dtype) -> Iterator[Group]:
    """Yields groups of rows of equal width whose numbers of blocks round up to the same power of two.

    So at most half of a group's blocks are padding.
    """
    offsets = np.cumsum(batch.query_lens) - batch.query_lens
    ends = batch.num_computed_tokens + batch.query_lens
    first_blocks = bounds.first(batch.num_computed_tokens) // size
    counts = -(-ends // size) - first_blocks
    kinds = batch.query_lens * 64 + np.ceil(np.log2(counts)).astype(np.int64)
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        width = int(kind) // 64
        most = int(counts[rows].max())
        queries = np.arange(width)
        # Padding repeats a row's last block, so that the row never reads the blocks of other sequences.
        columns = np.minimum(np.arange(most), counts[rows, None] - 1) + first_blocks[rows, None]
        key_positions = (first_blocks[rows, None] * size + np.arange(most * size))[:, None, :]
        query_positions = (batch.num_computed_tokens[rows, None] + queries)[:, :, None]
        hidden = (key_positions > query_positions) | (key_positions < bounds.first(query_positions))
        mask = torch.zeros(len(rows), 1, width, most * size, dtype=dtype)
        yield Group(
            tokens=torch.from_numpy((offsets[rows, None] + queries).ravel()),
            blocks=torch.from_numpy(tables[batch.slots[rows, None], columns].ravel()),
            mask=mask.masked_fill_(torch.from_numpy(hidden)[:, None], -torch.inf),
        )


def _gather(group: Group, cache: Tensor) -> Tensor:
    """Returns a group's keys or values [N, Hkv, B * block_size, d] of a layer's pool."""
    rows, _, _, length = group.mask.shape
    return cache.index_select(0, group.blocks).view(rows, length, *cache.shape[2:]).transpose(1, 2)


def _attend(layer: Attention, group: Group, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns the attention [N * W, Hq, dv] of a group's queries `q` [N * W, Hq, d]."""
    rows, _, width, _ = group.mask.shape
    _, heads, dim = q.shape
    kv_heads, scale = layer.kv_heads, layer.scale
    k, v = _gather(group, keys), _gather(group, values)
    if width == 1:
        # The query heads of a KV head are treated as its queries, which is faster than repeating keys and values.
        folded = q.view(rows, kv_heads, heads // kv_heads, dim)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask, scale=scale).view(rows, heads, -1)
    q = q.view(rows, width, heads, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, enable_gqa=heads != kv_heads, scale=scale)
    return out.transpose(1, 2).reshape(rows * width, heads, -1)


def _attend_by_parts(
    layer: Attention, group: Group, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
) -> Tensor:
    """Returns what `_attend` returns, with a soft cap or with `sinks` [Hq]."""
    rows, _, width, length = group.mask.shape
    k, v = (_gather(group, cache).repeat_interleave(layer.group, 1) for cache in (keys, values))
    scores = q.view(rows, width, layer.heads, -1).transpose(1, 2).float() @ k.float().mT * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores += group.mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, -1, 1, 1).expand(rows, -1, width, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :length].to(v.dtype)
    return (weights @ v).transpose(1, 2).reshape(rows * width, layer.heads, -1)
