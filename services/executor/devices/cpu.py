"""The CPU as a device: PyTorch, eager, one step at a time."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from services.executor.devices.attention import KVCache, PagedAttention
from services.executor.devices.protocol import Capacity, Int64, SlotSampling, StepBatch
from services.executor.devices.slots import DeviceSlots
from services.executor.models.model import CausalLM
from services.executor.sampling import sample


def has_half_precision(cpuinfo: Path) -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware. Where it does not, float32 is faster and more exact.

    Args:
        cpuinfo: what Linux says of the CPU.
    """
    try:
        flags = cpuinfo.read_text().split()
    except OSError:
        return False
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags)


class CpuDevice:
    """A `Device`."""

    def __init__(self, model: CausalLM, capacity: Capacity) -> None:
        self.capacity = capacity
        self.busy = 0.0
        self._model = model
        self._slots = DeviceSlots(capacity)
        self._cache = KVCache(model.spec, capacity.num_blocks, capacity.block_size, model.embedding.dtype)

    def add(self, slot: int, blocks: Sequence[int], sampling: SlotSampling) -> None:
        """See `Device.add`."""
        self._slots.add(slot, blocks, sampling)

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """See `Device.extend`."""
        self._slots.extend(slots, blocks)

    def remove(self, slot: int) -> None:
        """Nothing to do: what the slot held is overwritten when it is taken again."""

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> Int64:
        """See `Device.step`."""
        began = time.perf_counter()
        ends = batch.starts + batch.widths
        behind = np.cumsum(batch.widths)
        positions = np.arange(len(batch.token_ids)) + np.repeat(ends - behind, batch.widths)
        attend = PagedAttention(self._cache, self._slots.tables, batch, positions)
        hidden = self._model(torch.from_numpy(batch.token_ids), torch.from_numpy(positions), attend)
        tokens = np.full(len(batch.slots), -1, np.int64)
        rows = np.flatnonzero(batch.samples)
        if rows.size:
            logits = self._model.logits(hidden[torch.from_numpy(behind[rows] - 1)])
            tokens[rows] = sample(logits, self._slots.sampling(batch.slots[rows], ends[rows])).numpy()
        self.busy += time.perf_counter() - began
        return tokens

    def close(self) -> None:
        """Drops the model and the KV pool."""
        del self._model, self._cache
