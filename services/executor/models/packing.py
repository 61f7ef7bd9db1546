"""Packs the matrices of a model as integers for the CPU kernels, one after the other, straight from the checkpoint."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor, nn

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed import Packed, side_by_side
from pagewire.services.executor.models.compiled import Embedding, Linear
from pagewire.services.executor.models.layers import PackedLinear
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.quantized.layouts import IntegerWeights
from pagewire.services.executor.models.quantized.rounding import round_weights
from pagewire.services.executor.models.tensors import TensorSource
from pagewire.services.executor.models.weights import Shapes

_log = structlog.get_logger()


class CpuPacking(msgspec.Struct, frozen=True):
    """A `Packing` of integers for the CPU kernels."""

    kernels: CpuKernels
    bits: int | None
    """8 or 4: to which plain weights are rounded, those of the vocabulary to 8; None: they stay plain."""

    def pack(self, model: CausalLM, source: TensorSource, parts: Mapping[str, Shapes], dtype: torch.dtype) -> None:
        """See `Packing.pack`: replaces each module whose weights are integers, or become such."""
        packer = _Packer(source, dtype, self.kernels)
        embedding, head = model.embedding, model.lm_head
        for path, module in list(model.named_modules()):
            looked_up = isinstance(module, nn.Embedding) and module.weight is embedding
            if not looked_up and not isinstance(module, nn.Linear | PackedLinear):
                continue
            bits = self.bits and (8 if looked_up or module is head else self.bits)
            packed = packer.pack(parts[f"{path}.weight"], parts.get(f"{path}.bias", {}), bits)
            if packed is None:
                continue
            replacement: nn.Module = Linear(packed, self.kernels)
            if looked_up:
                if head is None:
                    model.lm_head = replacement
                replacement = Embedding(packed, embedding.detach().to(dtype), self.kernels)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, replacement)
        if packer.matrices:
            _log.info("weights_packed", matrices=dict(packer.matrices), bytes=packer.nbytes)


class _Packer:
    """Packs the parts of one matrix after the other.

    Attributes:
        matrices: how many tensors have been packed, by bits.
        nbytes: their memory.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype, kernels: CpuKernels) -> None:
        self.matrices: Counter[str] = Counter()
        self.nbytes = 0
        self._source, self._dtype, self._kernels = source, dtype, kernels

    def pack(self, weights: Shapes, biases: Shapes, bits: int | None) -> Packed | None:
        """Returns the parts side by side; None if none of them is an integer matrix."""
        integers = {name: self._integers(name, shape, bits) for name, shape in weights.items()}
        if all(found is None for found in integers.values()):
            return None
        parts = []
        shapes: Sequence[Any] = [*biases.items()] or [None] * len(weights)
        for (name, found), bias in zip(integers.items(), shapes, strict=True):
            added = None if bias is None else self._read(*bias)
            if found is None:
                parts.append(self._kernels.pack(self._read(name, weights[name]), added))
                continue
            fields = (found.codes, found.bits, found.scales, found.zero, found.minima)
            parts.append(self._kernels.pack_integers(*fields, added))
            self.matrices[f"int{found.bits}"] += 1
            self.nbytes += parts[-1].nbytes
        return side_by_side(parts)

    def _integers(self, name: str, shape: tuple[int, ...], bits: int | None) -> IntegerWeights | None:
        stored = self._source.integers(name)
        if stored is not None or bits is None:
            return stored
        return round_weights(self._read(name, shape), bits)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape, dtype=self._dtype)
        self._source.read({name: out})
        return out
