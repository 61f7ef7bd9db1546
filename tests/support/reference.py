"""The CPU device with attention in PyTorch, which is compared with every other device."""

import torch
from typing_extensions import override

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.gathered_attention import GatheredPool
from pagewire.services.executor.devices.protocol import Capacity, StepBatch
from pagewire.services.executor.models.model import AttentionFn, ModelSpec


class ReferenceBackend(CompiledBackend):
    """A backend that gathers each row's keys and values. It samples with the compiled kernels."""

    def __init__(self, spec: ModelSpec, capacity: Capacity, dtype: torch.dtype) -> None:
        super().__init__(CpuKernels(build.load(), 1), spec, capacity, dtype)
        self._pool = GatheredPool(spec, capacity, dtype)
        self.layers = self._pool.layers

    @override
    def attention(self, batch: StepBatch, slots: CpuSlots) -> AttentionFn:
        return self._pool.attention(batch, slots)
