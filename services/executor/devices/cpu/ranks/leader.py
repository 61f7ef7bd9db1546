"""Rank 0 of a model's ranks: has the others repeat each call of the model and of the KV pool."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.adapters import CpuAdapters
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledAttention
from pagewire.services.executor.devices.cpu.ranks.shared_calls import Call, SharedCalls
from pagewire.services.executor.devices.protocol import Capacity, Int64, StepBatch
from pagewire.services.executor.devices.ranks.adapters import LeadingAdapters
from pagewire.services.executor.models.model import AttentionFn, CausalLM, ModelSpec


class LeadingLM(CausalLM):
    """A rank's part of a model, whose calls the other ranks repeat.

    Its methods raise DeviceLost when a rank is lost.
    """

    def __init__(
        self, model: CausalLM, calls: SharedCalls, kernels: CpuKernels, adapters: LeadingAdapters | None = None
    ) -> None:
        """`model` is the part of rank 0, `adapters` are those of the slots; None: there are none."""
        super().__init__(model.spec, width=1, tied=True)
        self.model = model
        self._calls, self._kernels, self._adapters = calls, kernels, adapters

    @property
    def embedding(self) -> Tensor:
        """The rows of rank 0."""
        return self.model.embedding

    @property
    @override
    def progress(self) -> float:
        return self.model.progress

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        assert isinstance(attend, CompiledAttention)
        assert attend.step is not None
        self._calls.forward(attend.step, self._kernels.threads, self._numbers(attend.step))
        return self.model.forward(token_ids, positions, attend)

    def _numbers(self, step: StepBatch) -> Int64 | None:
        """Returns the numbers of the adapters of a step's rows. The other ranks forget those that no step names now."""
        if self._adapters is None:
            return None
        if unused := self._adapters.unused(self._calls.copies):
            self._calls.forget(unused)
        return self._adapters.numbers(step)

    @override
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self.model.vocabulary is None:  # this rank has the whole output matrix
            return self.model.logits(hidden, out)
        parts = []
        for rows in torch.split(hidden, self._calls.rows):
            self._calls.head(Call.LOGITS, rows, self._kernels.threads)
            parts.append(self.model.logits(rows))
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if out is None else out.copy_(whole)

    @override
    def argmax(self, hidden: Tensor) -> Int64 | None:
        if self.model.vocabulary is None or self.model.logit_cap:
            return self.model.argmax(hidden)
        parts = []
        for rows in torch.split(hidden, self._calls.rows):
            self._calls.head(Call.ARGMAX, rows, self._kernels.threads)
            ids = self.model.argmax(rows)
            assert ids is not None
            parts.append(ids)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class LeadingBackend(CompiledBackend):
    """The KV pool of rank 0, whose copies of blocks the other ranks repeat."""

    def __init__(
        self,
        kernels: CpuKernels,
        spec: ModelSpec,
        capacity: Capacity,
        dtype: torch.dtype,
        adapters: CpuAdapters | None,
        calls: SharedCalls,
    ) -> None:
        """`adapters` are those of rank 0."""
        super().__init__(kernels, spec, capacity, dtype, adapters)
        self._calls = calls

    @override
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        most = self._calls.copies
        for first in range(0, len(sources), most):
            some = slice(first, first + most)
            self._calls.copy(np.array(sources[some], np.int64), np.array(targets[some], np.int64))
        super().copy(sources, targets)
