"""Attention over a paged KV pool in PyTorch, by its definition: for tests, and for the self-test of a GPU's model."""

import torch
from torch import Tensor
from typing_extensions import override

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.protocol import Capacity, Int64, StepBatch
from pagewire.services.executor.models.model import AttentionFn, ModelSpec


def dense_attention(layer: Attention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Returns the attention [W, Hq, dv] of the last W of L positions to all of them: q [W, Hq, d], k [L, Hkv, d].

    >>> layer = Attention(heads=1, kv_heads=1, head_size=1, scale=1.0, window=2)
    >>> keys, values = torch.zeros(3, 1, 1), torch.tensor([8.0, 2.0, 4.0]).view(3, 1, 1)
    >>> dense_attention(layer, torch.zeros(2, 1, 1), keys, values).flatten()
    tensor([5., 3.])
    """
    keys, values = (x.repeat_interleave(layer.group, dim=1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * layer.scale
    if layer.soft_cap:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    key = torch.arange(len(keys))
    query = key[-len(q) :, None]
    hidden = key > query
    if layer.window:
        hidden |= key <= query - layer.window
    if layer.chunk:
        hidden |= key < query // layer.chunk * layer.chunk
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


class GatheredPool:
    """A KV pool, and attention that gathers each row's context from it.

    Attributes:
        layers: keys [blocks, block size, Hkv, d] and values [blocks, block size, Hkv, dv] of each layer; layers at the
            same place of their groups share them.
    """

    def __init__(self, spec: ModelSpec, capacity: Capacity, dtype: torch.dtype) -> None:
        self.spec, self._groups = spec.layers, spec.groups
        sizes = capacity.num_blocks, capacity.block_size
        pools = [
            (
                torch.zeros(*sizes, layer.kv_heads, layer.head_size, dtype=dtype),
                torch.zeros(*sizes, layer.kv_heads, layer.value_head_size, dtype=dtype),
            )
            for layer in (spec.layers[i] for i in self._groups.shared)
        ]
        self.layers = [pools[place] for place in self._groups.places]

    def attention(self, batch: StepBatch, slots: CpuSlots) -> AttentionFn:
        """Returns the attention of one step."""
        return _GatheredAttention(self, batch, [slots.tables[group] for group in self._groups.groups])


class _GatheredAttention(AttentionFn):
    """The attention of one step over a `GatheredPool`, with the block table of each layer."""

    def __init__(self, pool: GatheredPool, batch: StepBatch, tables: list[Int64]) -> None:
        self._pool, self._batch, self._tables = pool, batch, tables

    @override
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        size = self._pool.layers[layer][0].shape[1]
        keys, values = (pool.flatten(0, 1) for pool in self._pool.layers[layer])
        spec, batch = self._pool.spec[layer], self._batch
        out = q.new_empty(*q.shape[:2], spec.value_head_size)
        stop = 0
        for slot, first, width in zip(batch.slots, batch.num_computed_tokens, batch.query_lens, strict=True):
            rows = slice(stop, stop := stop + int(width))
            positions = torch.arange(first + width)
            places = torch.from_numpy(self._tables[layer][slot])[positions // size] * size + positions % size
            keys[places[first:]], values[places[first:]] = k[rows].to(keys.dtype), v[rows].to(values.dtype)
            out[rows] = dense_attention(spec, q[rows], keys[places], values[places], sinks)
        return out
