"""The attention of one step over the KV pool, and what a backend of attention provides for that."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from pagewire.kernels.attention_layer import Batch
from pagewire.kernels.triton.attention.rotary_cache import Rotary, rotary_cache
from pagewire.kernels.triton.step.step_inputs import StepInputs
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.protocol import StepBatch
from pagewire.services.executor.models.model import AttentionFn

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class BucketAttention(Protocol):
    """Attention of the steps of one shape, over keys and values that are in the pool."""

    def plan(self, batch: StepBatch) -> None:
        """Prepares the host's part of the next run. Before the device runs it, captured or not; also without rows."""

    def begin(self) -> None:
        """Enqueues what the layers of a step share. Its launches depend on the shape only, as those of a call do."""

    def __call__(self, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Returns the attention [T, Hq, dv] of `query` [T, Hq, d] of a layer. For `sinks` see `AttentionFn`."""


class AttentionBackend(Protocol):
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


class StepAttention(AttentionFn):
    """The attention of one step: writes keys and values to the pool, and has a backend attend."""

    def __init__(self, pool: KVPool, inputs: Sequence[StepInputs], attend: BucketAttention) -> None:
        """`inputs` are those of each group of layers."""
        self._pool = pool
        self._inputs = inputs
        self._attend = attend
        self._unrotated = torch.empty(1, 0, device=inputs[0].ids.device)

    @override
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
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
