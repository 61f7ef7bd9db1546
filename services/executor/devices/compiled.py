"""The CPU backend with compiled kernels: attention that reads blocks in place, and sampling of all rows in one call."""

import math

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels, SamplingTable, address, batch_of
from pagewire.services.executor.devices.protocol import Capacity, Int64, StepBatch
from pagewire.services.executor.devices.slots import DeviceSlots
from pagewire.services.executor.models.compiled import Attention
from pagewire.services.executor.models.model import AttentionFn, ModelSpec


class CompiledBackend:
    """A `Backend` whose result for a row is bitwise independent of the other rows of the batch."""

    def __init__(self, kernels: CpuKernels, spec: ModelSpec, capacity: Capacity, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._windows = spec.windows
        self._table = SamplingTable()
        self._stop_ids: Int64 | None = None
        keys, values = kernels.pool_shapes(
            capacity.num_blocks, spec.num_kv_heads, spec.head_dim, capacity.block_size, dtype
        )
        self.layers = [(_zeros(dtype, *keys), _zeros(dtype, *values)) for _ in spec.windows]

    @staticmethod
    def bytes_per_block(kernels: CpuKernels, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one block over all layers."""
        shapes = kernels.pool_shapes(1, spec.num_kv_heads, spec.head_dim, block_size, dtype)
        return len(spec.windows) * sum(map(math.prod, shapes)) * dtype.itemsize

    def attention(self, batch: StepBatch, slots: DeviceSlots, positions: Int64) -> AttentionFn:
        """See `Backend.attention`."""
        rows = batch_of(batch.slots, batch.num_computed_tokens, batch.query_lens, slots.tables)
        return Attention(self._kernels, rows, self._windows, self.layers)

    def sample(self, logits: Tensor, slots: DeviceSlots, rows: Int64, positions: Int64) -> Int64:
        """See `Backend.sample`."""
        ids = slots.stop_ids.table
        if self._stop_ids is not ids:  # the table is replaced when it grows; the records stay where they are
            self._stop_ids = ids
            self._table = SamplingTable(address(slots.records), address(ids), ids.shape[1])
        return self._kernels.sample(logits, self._table, rows, positions)


def _zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns zeros. Memory of numpy's zeros is only taken where it is written."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
