"""The adapters of a CPU's slots."""

from collections.abc import Mapping

import numpy as np
import torch
from typing_extensions import override

from pagewire.kernels.cpu.adapters import CompiledAdapter, StepAdapters
from pagewire.kernels.cpu.kernels import CpuKernels, Int64
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.targets import Targets
from pagewire.services.executor.devices.protocol import AdapterSlots, LoadedAdapter, StepBatch


class CpuAdapters(AdapterSlots):
    """Adapters in the layouts of the compiled kernels. A row's result is independent of the others in its batch."""

    def __init__(self, kernels: CpuKernels, targets: Targets, numbers: Mapping[str, int], dtype: torch.dtype) -> None:
        """`numbers`: number of each product of the model, by the path of its module. `dtype` is the model's."""
        self.targets = targets
        self._kernels, self._numbers = kernels, numbers
        self._dtype = dtype if dtype == torch.bfloat16 else torch.float32
        self._slots: dict[int, LoadedAdapter] = {}

    @override
    def pack(self, adapter: Adapter) -> CompiledAdapter:
        updates = {self._numbers[path]: several for path, several in adapter.updates.items()}
        return CompiledAdapter(self._kernels, updates, len(self._numbers) + 1, self._dtype)

    @override
    def assign(self, slot: int, adapter: LoadedAdapter) -> None:
        self._slots[slot] = adapter

    @override
    def clear(self, slot: int) -> None:
        del self._slots[slot]

    def of_batch(self, batch: StepBatch) -> StepAdapters | None:
        """Returns the adapters of a step's tokens; None: there are none."""
        if not self._slots:
            return None
        rows: dict[int, tuple[CompiledAdapter, list[int]]] = {}
        for row, slot in enumerate(batch.slots.tolist()):
            if (adapter := self._slots.get(slot)) is not None:
                packed: CompiledAdapter = adapter.packed
                rows.setdefault(id(packed), (packed, []))[1].append(row)
        return StepAdapters([(packed, _tokens(batch, own)) for packed, own in rows.values()]) if rows else None


def _tokens(batch: StepBatch, rows: list[int]) -> Int64:
    """Returns the places of the tokens of some rows."""
    if len(batch.token_ids) == len(batch.slots):
        return np.array(rows)
    ends = batch.query_lens.cumsum()
    return np.concatenate([np.arange(ends[row] - batch.query_lens[row], ends[row]) for row in rows])
