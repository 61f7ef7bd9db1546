"""Paged attention on the CPU: gathers each row's blocks, then one fused attention per group of similar rows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.services.executor.devices.protocol import Int64, StepBatch
from pagewire.services.executor.models.model import ModelSpec


class KVCache:
    """The KV pool: per layer, keys and values [num_blocks, block_size, Hkv, d]."""

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        shape = (len(spec.windows), 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        # Memory of numpy's zeros is only taken where it is written. The pool must be zero: a masked position has the
        # weight 0, and 0 times the NaN of an uninitialised block is NaN.
        pool = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
        self.block_size = block_size
        self.windows = spec.windows
        self.dtype = dtype
        self.layers = [(layer[0], layer[1]) for layer in pool]

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one block over all layers."""
        return len(spec.windows) * 2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


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
        """`tables` [slots, blocks] are the block tables, `positions` [T] the positions of the batch's tokens."""
        size = cache.block_size
        owners = np.repeat(batch.slots, batch.query_lens)
        self._cache = cache
        self._written = torch.from_numpy(tables[owners, positions // size] * size + positions % size)
        begun = positions % size == 0
        self._begun = torch.from_numpy(tables[owners[begun], positions[begun] // size])
        self._groups = {
            window: list(_groups(batch, tables, size, window, cache.dtype)) for window in set(cache.windows)
        }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionFn`."""
        keys, values = self._cache.layers[layer]
        if self._cache.dtype == torch.float16:
            # float16 overflows, and an infinity left in a block would spoil the next sequence that gets the block.
            k, v = k.nan_to_num(), v.nan_to_num()
        if len(self._begun):
            # A hidden position has the weight 0, and 0 times a NaN of the block's last owner would be NaN.
            keys.index_fill_(0, self._begun, 0.0)
            values.index_fill_(0, self._begun, 0.0)
        keys.flatten(0, 1).index_copy_(0, self._written, k)
        values.flatten(0, 1).index_copy_(0, self._written, v)
        out = torch.empty_like(q)
        for group in self._groups[self._cache.windows[layer]]:
            out[group.tokens] = _attend(group, q[group.tokens], keys, values)
        return out


def _groups(batch: StepBatch, tables: Int64, size: int, window: int, dtype: torch.dtype) -> Iterator[Group]:
    """Yields groups of rows of equal width whose numbers of blocks round up to the same power of two.

    So at most half of a group's blocks are padding.
    """
    offsets = np.cumsum(batch.query_lens) - batch.query_lens
    ends = batch.num_computed_tokens + batch.query_lens
    first_blocks = np.maximum(batch.num_computed_tokens - window + 1, 0) // size if window else np.zeros_like(ends)
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
        hidden = key_positions > query_positions
        if window:
            hidden |= key_positions <= query_positions - window
        mask = torch.zeros(len(rows), 1, width, most * size, dtype=dtype)
        yield Group(
            tokens=torch.from_numpy((offsets[rows, None] + queries).ravel()),
            blocks=torch.from_numpy(tables[batch.slots[rows, None], columns].ravel()),
            mask=mask.masked_fill_(torch.from_numpy(hidden)[:, None], -torch.inf),
        )


def _attend(group: Group, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns the attention of a group's queries `q` [N * W, Hq, d], in the same shape."""
    rows, _, width, length = group.mask.shape
    _, heads, dim = q.shape
    kv_heads = keys.shape[2]
    k = keys.index_select(0, group.blocks).view(rows, length, kv_heads, dim).transpose(1, 2)
    v = values.index_select(0, group.blocks).view(rows, length, kv_heads, dim).transpose(1, 2)
    if width == 1:
        # The query heads of a KV head are treated as its queries, which is faster than repeating keys and values.
        folded = q.view(rows, kv_heads, heads // kv_heads, dim)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask).view(rows, heads, dim)
    q = q.view(rows, width, heads, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, enable_gqa=heads != kv_heads)
    return out.transpose(1, 2).reshape(rows * width, heads, dim)
