"""The attention of one layer over random keys and values, by either backend."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.attention_layer import Attention, Batch
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.protocol import NO_ROWS, Capacity
from pagewire.services.executor.models.model import ModelSpec
from tests.services.executor.devices.cuda.twins import batch_of

Rows = list[tuple[int, int]]
"""(queries, length) of each row."""
BLOCK_SIZE, BLOCKS, SLOTS, WIDTH = 4, 24, 3, 8


class OneLayer:
    """A layer that attends with one query over one set of keys and values in every call."""

    def __init__(self, layer: Attention, rows: Rows, runtime: Runtime, dtype: torch.dtype) -> None:
        device = runtime.device
        self._layer, self._runtime, spec = layer, runtime, ModelSpec(90, (layer,))
        self._capacity = Capacity(BLOCKS, BLOCK_SIZE, SLOTS, BLOCK_SIZE * WIDTH, 90, windows=spec.groups.windows)
        self._pool = KVPool(spec, self._capacity, dtype, runtime, 16)
        for cache in self._pool.caches[0]:
            cache.normal_()
        self._step = batch_of(
            *((SLOTS - 1 - row, length - count, [0] * count, True) for row, (count, length) in enumerate(rows))
        )
        queries = np.cumsum([0, *self._step.query_lens])
        slots, lengths, cu_queries = (
            torch.from_numpy(column).int().to(device) for column in (self._step.slots, self._step.ends, queries)
        )
        tables = torch.randperm(BLOCKS).int().view(SLOTS, WIDTH).to(device)
        self._batch = Batch(slots, lengths, cu_queries, tables)
        self._bucket = Bucket(SLOTS, int(queries[-1]), decode=all(count == 1 for count, _ in rows))
        self._query = torch.randn(self._bucket.tokens, layer.heads, layer.head_size, dtype=dtype, device=device)

    def by(self, backend: Callable[[KVPool, Capacity, Runtime], AttentionBackend], *, captured: bool) -> Tensor:
        """Returns the result in float32 on the CPU."""
        attention = backend(self._pool, self._capacity, self._runtime)
        attend = attention.attend([self._batch], self._bucket, captured=captured)
        results: list[Tensor] = []

        def work() -> None:
            attend.begin()
            results[:] = [attend(0, self._query, None)]

        run: Callable[[], None] = work
        if captured:
            attend.plan(NO_ROWS)
            (run,) = self._runtime.capture([work])
        attend.plan(self._step)
        for out in results:
            out.zero_()
        run()
        return results[0].float().cpu().clone()
