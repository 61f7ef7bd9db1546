"""Packs the matrices of a model as integers for the CPU kernels, one after the other, straight from the checkpoint."""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby, islice, zip_longest

import msgspec
import structlog
import torch
from torch import Tensor, nn

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed import Packed, side_by_side
from pagewire.services.executor.devices.cpu.compiled_model import Embedding, Linear, PackedExperts
from pagewire.services.executor.models.feed_forward import Experts, MixtureOfExperts
from pagewire.services.executor.models.layers import PackedLinear, Stored
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.quantized.layouts import GROUP, IntegerWeights
from pagewire.services.executor.models.quantized.rounding import round_weights
from pagewire.services.executor.models.shard import Units
from pagewire.services.executor.models.tensors import TensorSource
from pagewire.services.executor.models.weights import Parts, inputs_dim, read_part

_log = structlog.get_logger()

VOCABULARY_BITS = 6
"""Least bits to which the vocabulary's weights are rounded: they matter more to the quality than other weights."""


class CpuPacking(msgspec.Struct, frozen=True):
    """A `Packing` of integers for the CPU kernels."""

    kernels: CpuKernels
    bits: int | None
    """Bits to which plain weights are rounded, 8 or 4; None: they stay plain."""

    @property
    def units(self) -> Units:
        """The units in which weights may be cut for several ranks: groups that are rounded here stay whole."""
        return Units() if self.bits is None else Units(inputs=GROUP)

    def pack(self, model: CausalLM, source: TensorSource, parts: Mapping[str, Parts], dtype: torch.dtype) -> None:
        """Replaces each module whose weights are integers, or become integers."""
        packer = _Packer(source, dtype, self.kernels)
        embedding, head = model.embedding, model.lm_head
        routers = {id(part) for part in model.modules() if isinstance(part, MixtureOfExperts) for part in part.routers}
        for path, module in list(model.named_modules()):
            looked_up = isinstance(module, nn.Embedding) and module.weight is embedding
            if isinstance(module, Experts):
                replacement: nn.Module | None = self._experts(packer, path, module, parts)
            elif looked_up or isinstance(module, nn.Linear | PackedLinear):
                bits = max(self.bits, VOCABULARY_BITS) if self.bits and (looked_up or module is head) else self.bits
                weights, biases = parts[f"{path}.weight"], parts.get(f"{path}.bias", {})
                packed = packer.pack(weights, biases, module.weight.shape, None if id(module) in routers else bits)
                replacement = None if packed is None else Linear(packed, self.kernels)
                if looked_up and packed is not None:
                    if head is None:
                        model.lm_head = replacement
                    replacement = Embedding(packed, embedding.detach().to(dtype), self.kernels)
            else:
                continue
            if replacement is not None:
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, replacement)
        if packer.matrices:
            _log.info("weights_packed", matrices=dict(packer.matrices), bytes=packer.nbytes)

    def _experts(
        self, packer: "_Packer", path: str, module: Experts, parts: Mapping[str, Parts]
    ) -> PackedExperts | None:
        """Returns the experts of a layer; None if any of their matrices is not of integers."""
        pairs = []
        for i in range(len(module.own)):
            up, down = (
                packer.pack(dict(part), {}, torch.Size(), self.bits)
                for part in (
                    islice(parts[f"{path}.gate_up"].items(), 2 * i, 2 * i + 2),
                    islice(parts[f"{path}.down"].items(), i, i + 1),
                )
            )
            if up is None or down is None:
                return None
            pairs.append((up, down))
        return PackedExperts(module, pairs)


class _Packer:
    """Packs the parts of one matrix after the other.

    Attributes:
        matrices: how many tensors have been packed, by bits.
        nbytes: memory of the packed tensors.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype, kernels: CpuKernels) -> None:
        self.matrices: Counter[str] = Counter()
        self.nbytes = 0
        self._source, self._dtype, self._kernels = source, dtype, kernels

    def pack(self, weights: Parts, biases: Parts, shape: torch.Size, bits: int | None) -> Packed | None:
        """Returns the parts of a matrix of `shape` side by side; None if none of them is an integer matrix."""
        integers = {name: self._integers(name, stored, shape, bits) for name, stored in weights.items()}
        if all(matrix is None for matrix in integers.values()):
            return None
        added = [self._read(name, stored, shape[:1]) for name, stored in biases.items()]
        parts = []
        for alike, run in groupby(zip_longest(integers.items(), added), lambda part: part[0][1] and part[0][1].layout):
            named, several = zip(*run, strict=True)
            bias = torch.cat(several) if biases else None
            if alike is None:
                plain = [self._read(name, weights[name], shape) for name, _ in named]
                parts.append(self._kernels.pack(torch.cat(plain), bias))
                continue
            # One product takes less time than several, which would each round their inputs.
            joined = IntegerWeights.concatenated([one for _, one in named if one is not None])
            fields = (joined.codes, joined.bits, joined.scales, joined.zero, joined.minima)
            parts.append(self._kernels.pack_integers(*fields, bias))
            self.matrices[f"int{joined.bits}"] += len(named)
            self.nbytes += parts[-1].nbytes
        return side_by_side(parts)

    def _integers(self, name: str, part: Stored, whole: torch.Size, bits: int | None) -> IntegerWeights | None:
        stored = self._source.integers(name) if part.in_rows else None
        if stored is not None or bits is None:
            return stored
        source, slices = self._source.uncut(name)
        inputs = slices.get(inputs_dim(part, whole))
        if inputs is None:
            return round_weights(self._read(name, part, whole), bits)
        # Groups of a row share steps: rounded as a whole, a rank's inputs have the weights that one rank gives them.
        uncut = part._replace(shape=source.shape(name))
        rows = torch.Size((part.shape[0], uncut.shape[1]) if part.in_rows else uncut.shape[::-1])
        return round_weights(read_part(source, name, uncut, rows, self._dtype), bits).columns(inputs[0])

    def _read(self, name: str, part: Stored, whole: torch.Size) -> Tensor:
        return read_part(self._source, name, part, whole, self._dtype)
