"""The KV pool, and the attention of one step over it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels import split_attention
from pagewire.kernels.attention_layer import Attention, Batch
from pagewire.kernels.paged_attention import paged_attention
from pagewire.kernels.plan_splits import capacity as programs
from pagewire.kernels.plan_splits import plan_splits
from pagewire.kernels.rotary_cache import Rotary, rotary_cache
from pagewire.kernels.step_inputs import StepInputs
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.models.model import ModelSpec


class KVPool:
    """Keys and values of every layer, and the plans by which programs share contexts.

    Attributes:
        dummy: the block after all others, which rows that do not run write to.
    """

    def __init__(
        self,
        spec: ModelSpec,
        heads: int,
        capacity: Capacity,
        dtype: torch.dtype,
        runtime: Runtime,
        max_tokens: int,
        cached: torch.dtype | None = None,
    ) -> None:
        """Most steps have up to `max_tokens` tokens, in `dtype`; keys and values are stored as `cached`.

        Keys and values in float8_e4m3fn have no scale: values beyond 448 are clamped.
        """
        kv_heads, dim = spec.num_kv_heads, spec.head_dim
        shape = (len(spec.windows), 2, capacity.num_blocks + 1, kv_heads, capacity.block_size, dim)
        pool = torch.zeros(shape, dtype=cached or dtype, device=runtime.device)
        self.dummy = capacity.num_blocks
        self.caches = [(layer[0], layer[1]) for layer in pool]
        self.layers = [Attention(heads, kv_heads, dim, dim**-0.5, window) for window in spec.windows]
        self._attended = torch.zeros(max_tokens, heads, dim, dtype=dtype, device=runtime.device)
        count = programs(runtime.multiprocessors, kv_heads)
        self.plans = {
            layer.window: split_attention.new_plan(layer, capacity.max_num_seqs, count, runtime.device)
            for layer in {layer.window: layer for layer in self.layers}.values()
        }

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies block `sources[i]` of every layer to block `targets[i]`; no target is a source."""
        for layer in self.caches:
            for cache in layer:
                cache[list(targets)] = cache[list(sources)]

    def attended(self, tokens: int) -> Tensor:
        """Returns the output buffer of attention [tokens, Hq, d], which all layers and steps share.

        It is initialised, because kernels do not write the padding after a step's tokens.
        """
        if tokens <= len(self._attended):
            return self._attended[:tokens]
        return torch.zeros(tokens, *self._attended.shape[1:], dtype=self._attended.dtype, device=self._attended.device)

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, cached: torch.dtype) -> int:
        """Returns the bytes of one block over all layers."""
        return len(spec.windows) * 2 * block_size * spec.num_kv_heads * spec.head_dim * cached.itemsize


class TritonAttention:
    """The attention of one step, an `AttentionFn`. Its kernel launches depend on the shapes of its tensors only."""

    def __init__(self, pool: KVPool, batch: Batch, inputs: StepInputs, *, decode: bool, split: bool) -> None:
        """`decode`: no row has more than one token.

        `split`: several programs share the context of a short row. Their number depends on the batch, and so do the
        last bits of the result. Without it the mixed kernel computes all rows, independently of the batch.
        """
        self._pool = pool
        self._batch = batch
        self._inputs = inputs
        self._decode, self._split = decode, split
        self._out = pool.attended(len(inputs.ids))

    def plan(self) -> None:
        """Plans the splits of contexts, once per step."""
        if not self._split:
            return
        for layer in {layer.window: layer for layer in self._pool.layers}.values():
            plan = self._pool.plans[layer.window]
            tile = split_attention.tiling(layer.head_size, self._out.element_size(), layer.group)["TILE"]
            limit = split_attention.most_queries(layer)
            lengths, cu_queries = self._batch.lengths, self._batch.cu_queries
            plan_splits(lengths, cu_queries, plan.capacity, limit, tile, layer.window, plan.cu_splits, plan.split_size)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionFn`."""
        still = Rotary(q.shape[1], k.shape[1], q.shape[2], rotary=0)
        angles = self._pool.plans[self._pool.layers[layer].window].logsum  # not read
        return self.rotated(layer, torch.cat((q, k, v), dim=1).flatten(1), still, angles)

    def rotated(
        self, layer: int, packed: Tensor, rotary: Rotary, angles: Tensor, norms: Sequence[Tensor | None] = (None, None)
    ) -> Tensor:
        """Returns the attention of `packed` [T, (Hq + 2 Hkv) * d]: queries, keys and values before norm and rotation.

        `angles` float32 [positions, d] has the cosines and sines of every position; `norms` are the RMSNorm weights [d]
        of the heads of queries and keys.
        """
        keys, values = self._pool.caches[layer]
        attention, inputs, batch = self._pool.layers[layer], self._inputs, self._batch
        out = self._out
        query = torch.empty_like(out)
        rotary_cache(rotary, packed, inputs.positions, inputs.places, angles, query, keys, values, *norms)
        shortest = 1
        if self._split:
            plan = self._pool.plans[attention.window]
            split_attention.split_attention(attention, batch, plan, query, keys, values, out)
            shortest = split_attention.most_queries(attention) + 1
        if not self._decode:
            paged_attention(attention, batch, query, keys, values, out, minimum=shortest)
        return out
