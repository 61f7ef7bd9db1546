"""The KV pool, the attention of one step over it, and what a backend of attention provides for that."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagewire.kernels.attention_layer import Attention, Batch
from pagewire.kernels.triton.attention.rotary_cache import Rotary, rotary_cache
from pagewire.kernels.triton.step.step_inputs import StepInputs
from pagewire.services.executor.devices.cuda.buckets import Bucket
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.protocol import Capacity, StepBatch
from pagewire.services.executor.models.model import ModelSpec

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class KVPool:
    """Keys and values of every layer.

    Attributes:
        dummy: the block after all others, which rows that do not run write to.
        dtype: that of queries and results.
        cached: that of the keys and values.
    """

    def __init__(
        self,
        spec: ModelSpec,
        capacity: Capacity,
        dtype: torch.dtype,
        runtime: Runtime,
        max_tokens: int,
        cached: torch.dtype | None = None,
    ) -> None:
        """Most steps have up to `max_tokens` tokens, in `dtype`; keys and values are stored as `cached`.

        Keys and values in float8_e4m3fn have no scale: values beyond 448 are clamped.
        """

        self.dtype, self.cached = dtype, cached or dtype

        def cache(layer: Attention, size: int) -> Tensor:
            shape = capacity.num_blocks + 1, layer.kv_heads, capacity.block_size, size
            return torch.zeros(shape, dtype=self.cached, device=runtime.device)

        self.dummy = capacity.num_blocks
        self.layers, self.groups = spec.layers, spec.groups
        shared = [self.layers[i] for i in self.groups.shared]
        caches = [(cache(layer, layer.head_size), cache(layer, layer.value_head_size)) for layer in shared]
        self.caches = [caches[place] for place in self.groups.places]
        self._attended = {
            sizes: torch.zeros(max_tokens, *sizes, dtype=dtype, device=runtime.device)
            for sizes in {(layer.heads, layer.value_head_size) for layer in self.layers}
        }

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies block `sources[i]` of every layer to block `targets[i]`, int32 on the device; no target is a source.

        Blocks are copied as bytes: not every operation knows float8.
        """
        for layer in self.groups.shared:
            for cache in self.caches[layer]:
                blocks = cache.view(len(cache), -1).view(torch.uint8)
                blocks.index_copy_(0, targets.long(), blocks.index_select(0, sources.long()))

    def attended(self, tokens: int) -> dict[tuple[int, int], Tensor]:
        """Returns the output buffers of attention [tokens, Hq, dv] by (Hq, dv), which all layers and steps share.

        They are initialised, because kernels do not write the padding after a step's tokens.
        """
        return {
            sizes: out[:tokens] if tokens <= len(out) else out.new_zeros(tokens, *sizes)
            for sizes, out in self._attended.items()
        }

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, cached: torch.dtype) -> int:
        """Returns the bytes of one block over all layers of a group."""
        layers = (spec.layers[i] for i in spec.groups.shared)
        numbers = sum(layer.kv_heads * (layer.head_size + layer.value_head_size) for layer in layers)
        return numbers * block_size * cached.itemsize


class BucketAttention(Protocol):
    """Attention of the steps of one shape, over keys and values that are in the pool."""

    def plan(self, batch: StepBatch) -> None:
        """Prepares the host's part of the next run. Before the device runs it, captured or not; also without rows."""

    def begin(self) -> None:
        """Enqueues what the layers of a step share. Its launches depend on the shape only, as those of a call do."""

    def __call__(self, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Returns the attention [T, Hq, dv] of `query` [T, Hq, d] of a layer. For `sinks` see `AttentionFn`."""


class Backend(Protocol):
    """Computes attention for one device.

    Attributes:
        pool: the keys and values.
        captures_mixed: whether steps with prompts can be captured. Those with one token per row always can.
    """

    pool: KVPool
    captures_mixed: bool

    def attend(self, batches: Sequence[Batch], bucket: Bucket, *, captured: bool) -> BucketAttention:
        """Returns the attention of the steps of a bucket, which will be `captured` or run as kernels one by one.

        `batches` are those of each group of layers.
        """


class StepAttention:
    """The attention of one step, an `AttentionFn`: writes keys and values to the pool, and has a backend attend."""

    def __init__(self, pool: KVPool, inputs: Sequence[StepInputs], attend: BucketAttention) -> None:
        """`inputs` are those of each group of layers."""
        self._pool = pool
        self._inputs = inputs
        self._attend = attend
        self._unrotated = torch.empty(1, 0, device=inputs[0].ids.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionFn`."""
        if q.shape[2] == v.shape[2]:
            still = Rotary(q.shape[1], k.shape[1], q.shape[2], rotary=0)
            return self.rotated(layer, torch.cat((q, k, v), dim=1).flatten(1), still, self._unrotated, sinks=sinks)
        places = self._inputs[self._pool.groups.groups[layer]].places
        for cache, new in zip(self._pool.caches[layer], (k, v), strict=True):
            size = cache.shape[2]
            if cache.dtype != new.dtype:
                new = new.clamp(-FP8_MAX, FP8_MAX)  # noqa: PLW2901
            cache.transpose(1, 2)[places // size, places % size] = new.to(cache.dtype)
        return self._attend(layer, q.contiguous(), sinks)

    def rotated(
        self,
        layer: int,
        packed: Tensor,
        rotary: Rotary,
        angles: Tensor,
        norms: Sequence[Tensor | None] = (None, None),
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention of `packed` [T, (Hq + 2 Hkv) * d]: queries, keys and values before norm and rotation.

        `angles` float32 [positions, d] has the cosines and sines of every position; `norms` are the RMSNorm weights [d]
        of the heads of queries and keys. For `sinks` see `AttentionFn`.
        """
        keys, values = self._pool.caches[layer]
        attention, inputs = self._pool.layers[layer], self._inputs[self._pool.groups.groups[layer]]
        query = packed.new_empty(len(packed), attention.heads, attention.head_size)
        rotary_cache(rotary, packed, inputs.positions, inputs.places, angles, query, keys, values, *norms)
        return self._attend(layer, query, sinks)
