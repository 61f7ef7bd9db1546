"""The CPU backend without compiled kernels: gathered attention and sampling in PyTorch."""

import torch
from torch import Tensor

from pagewire.services.executor.devices.cpu.pytorch_attention import KVCache, PagedAttention
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.edits import edit
from pagewire.services.executor.devices.logprobs import reduce_logprobs
from pagewire.services.executor.devices.protocol import Capacity, Int64, StepBatch
from pagewire.services.executor.devices.pytorch_sampling import sample
from pagewire.services.executor.models.model import AttentionFn, ModelSpec


class PyTorchBackend:
    """A `Backend` in plain PyTorch."""

    def __init__(self, spec: ModelSpec, capacity: Capacity, dtype: torch.dtype) -> None:
        self._cache = KVCache(spec, capacity.num_blocks, capacity.block_size, dtype)
        self.layers = self._cache.layers

    def attention(self, batch: StepBatch, slots: CpuSlots, positions: Int64) -> AttentionFn:
        """See `Backend.attention`."""
        return PagedAttention(self._cache, slots.tables, batch, positions)

    def edit(self, logits: Tensor, slots: CpuSlots, rows: Int64, positions: Int64) -> None:
        """See `Backend.edit`."""
        edits = [slots.edits[slot] for slot in rows]
        edit(logits, slots.records[rows], positions, edits, slots.banned(rows, positions))

    def sample(self, logits: Tensor, slots: CpuSlots, rows: Int64, positions: Int64) -> Int64:
        """See `Backend.sample`."""
        records = slots.records[rows]
        tokens: Int64 = sample(logits, records, positions).numpy()
        return tokens

    def reduce_logprobs(self, logits: Tensor, tokens: Tensor, num_logprobs: int, *, normalized: bool = True) -> Tensor:
        """See `Backend.reduce_logprobs`."""
        return reduce_logprobs(logits, tokens, num_logprobs, normalized=normalized)
