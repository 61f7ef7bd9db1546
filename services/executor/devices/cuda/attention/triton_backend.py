"""Attention by the kernels of this project. Programs share the contexts of short rows, as the device plans it."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from pagewire.kernels.attention_layer import Attention, Batch
from pagewire.kernels.triton.attention import decode_attention
from pagewire.kernels.triton.attention.decode_attention import SplitPlan
from pagewire.kernels.triton.attention.paged_attention import paged_attention
from pagewire.kernels.triton.attention.plan_splits import capacity as programs
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend, BucketAttention
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.protocol import Capacity, StepBatch

MOST_QUERIES = 32
"""Queries of a row whose context programs share, at most: each has partial results for every split."""


class TritonAttention(BucketAttention):
    """Attention by the kernels of this project. Its launches depend on the shapes of its tensors only."""

    def __init__(
        self, pool: KVPool, plans: Mapping[Attention, SplitPlan], batches: Sequence[Batch], bucket: Bucket
    ) -> None:
        self._pool, self._plans, self._batches = pool, plans, batches
        self._decode, self._split = bucket.decode, bucket.split
        self._out = pool.attended(bucket.tokens)

    @override
    def plan(self, batch: StepBatch) -> None:
        """Does nothing: the device plans."""

    @override
    def begin(self) -> None:
        """Enqueues the plans by which programs share contexts."""
        if not self._split:
            return
        for layer, plan in self._plans.items():
            decode_attention.plan_batch(layer, self._batches[0], plan, 1 if self._decode else plan.parts)

    @override
    def __call__(self, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        keys, values = self._pool.caches[layer]
        attention, batch = self._pool.layers[layer], self._batches[self._pool.groups.groups[layer]]
        out = self._out[attention.heads, attention.value_head_size]
        shortest = 1
        if self._split and not attention.chunk:
            plan = self._plans[attention]
            parts = 1 if self._decode else plan.parts
            decode_attention.split_attention(attention, batch, plan, query, keys, values, out, sinks, parts)
            shortest = decode_attention.most_queries(attention, parts) + 1
        if not self._decode or attention.chunk:
            paged_attention(attention, batch, query, keys, values, out, minimum=shortest, sinks=sinks)
        return out


class TritonBackend(AttentionBackend):
    """The kernels of this project, with the plans by which programs share contexts."""

    captures_mixed = True

    def __init__(self, pool: KVPool, capacity: Capacity, runtime: Runtime) -> None:
        self.pool = pool
        self._plans = {
            layer: decode_attention.new_plan(
                layer,
                capacity.max_num_seqs,
                programs(runtime.multiprocessors, layer.kv_heads),
                runtime.device,
                pool.dtype,
                pool.cached,
                min(1 + capacity.max_drafts, MOST_QUERIES),
            )
            for layer in dict.fromkeys(pool.layers)
        }

    @override
    def attend(self, batches: Sequence[Batch], bucket: Bucket, *, captured: bool) -> TritonAttention:
        return TritonAttention(self.pool, self._plans, batches, bucket)
