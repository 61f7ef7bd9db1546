"""The CPU backend with compiled kernels: attention that reads blocks in place, and sampling of all rows in one call."""

import math
from ctypes import addressof

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pagewire.kernels.cpu.kernels import CpuKernels, LogitEdits, SamplerInput, address, batches_of
from pagewire.services.executor.devices.cpu.adapters import CpuAdapters
from pagewire.services.executor.devices.cpu.compiled_model import CompiledAttention
from pagewire.services.executor.devices.cpu.device import Backend
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.edits import SlotEdits
from pagewire.services.executor.devices.protocol import Capacity, Int64, StepBatch
from pagewire.services.executor.models.model import AttentionFn, ModelSpec


class CompiledBackend(Backend):
    """Attention and sampling whose result for a row is bitwise independent of the other rows of the batch."""

    def __init__(
        self,
        kernels: CpuKernels,
        spec: ModelSpec,
        capacity: Capacity,
        dtype: torch.dtype,
        adapters: CpuAdapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._kernels = kernels
        self._spec = spec.layers
        self._table = SamplerInput()
        self._edits = (LogitEdits * capacity.max_num_seqs)()
        self._edited: list[SlotEdits | None] = [None] * capacity.max_num_seqs  # what `_edits` points to
        self._stop_ids: Int64 | None = None
        groups = spec.groups
        layers = [spec.layers[i] for i in groups.shared]
        shapes = [kernels.pool_shapes(capacity.num_blocks, layer, capacity.block_size, dtype) for layer in layers]
        pools = [(_zeros(dtype, *keys), _zeros(dtype, *values)) for keys, values in shapes]
        self.layers = [pools[place] for place in groups.places]
        self._tables = groups.groups

    @staticmethod
    def bytes_per_block(kernels: CpuKernels, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one block over all layers of a group."""
        shapes = (kernels.pool_shapes(1, spec.layers[i], block_size, dtype) for i in spec.groups.shared)
        return sum(math.prod(shape) for pair in shapes for shape in pair) * dtype.itemsize

    @override
    def attention(self, batch: StepBatch, slots: CpuSlots) -> AttentionFn:
        batches = batches_of(batch.slots, batch.num_computed_tokens, batch.query_lens, slots.tables)
        adapted = None if self._adapters is None else self._adapters.of_batch(batch)
        return CompiledAttention(self._kernels, batches, self._tables, self._spec, self.layers, adapted, batch)

    @override
    def edit(self, logits: Tensor, slots: CpuSlots, rows: Int64, positions: Int64) -> None:
        for slot in rows.tolist():
            edits = slots.edits[slot]
            if edits is not self._edited[slot]:
                self._edits[slot] = LogitEdits() if edits is None else _pointers(edits)
                self._edited[slot] = edits
        self._kernels.edit_logits(logits, self._sampler_input(slots), rows, positions)

    @override
    def sample(self, logits: Tensor, slots: CpuSlots, rows: Int64, positions: Int64) -> Int64:
        return self._kernels.sample(logits, self._sampler_input(slots), rows, positions)

    @override
    def reduce_logprobs(self, logits: Tensor, tokens: Tensor, num_logprobs: int, *, normalized: bool = True) -> Tensor:
        return self._kernels.reduce_logprobs(logits, tokens, num_logprobs, normalized=normalized)

    def _sampler_input(self, slots: CpuSlots) -> SamplerInput:
        ids = slots.stop_ids.table
        if self._stop_ids is not ids:  # the table is replaced when it grows; the records stay where they are
            self._stop_ids = ids
            self._table = SamplerInput(address(slots.records), address(ids), ids.shape[1], addressof(self._edits))
        return self._table


def _pointers(edits: SlotEdits) -> LogitEdits:
    values = edits.edits
    return LogitEdits(
        allowed=0 if edits.allowed is None else address(edits.allowed),
        bias_ids=address(values.bias_ids),
        biases=address(values.biases),
        num_biases=len(values.bias_ids),
        seen=0 if edits.seen is None else address(edits.seen),
        bad_words=address(values.bad_words),
        num_bad_words=len(values.bad_words),
        history=0 if edits.history is None else address(edits.history),
        num_prompt_tokens=values.num_prompt_tokens,
    )


def _zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns zeros. Memory of numpy's zeros is only taken where it is written."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
