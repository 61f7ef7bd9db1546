"""Keeps quantized weights as they are on the GPU, where kernels multiply with them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor, nn
from typing_extensions import override

from pagewire.kernels.triton.layers.eight_bit_linear import EightBitMatrix, eight_bit_linear
from pagewire.kernels.triton.layers.eight_bit_linear import tile_of as eight_bit_tile
from pagewire.kernels.triton.layers.integer_linear import IntegerMatrix, integer_linear, pack
from pagewire.kernels.triton.layers.round_rows import LARGEST, round_rows
from pagewire.kernels.triton.layers.split_inputs import counters_of
from pagewire.services.executor.models.layers import PackedLinear
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.quantized.layouts import IntegerWeights
from pagewire.services.executor.models.quantized.numbers import Scaled
from pagewire.services.executor.models.shard import Units
from pagewire.services.executor.models.tensors import TensorSource
from pagewire.services.executor.models.weights import Packing, Parts

_log = structlog.get_logger()


class IntegerLinear(nn.Module):
    """A matrix product with weights as integers."""

    def __init__(self, weights: IntegerMatrix, bias: Tensor | None) -> None:
        super().__init__()
        self._per_word, self._zero = weights.per_word, weights.zero
        for name, tensor in (
            ("codes", weights.codes),
            ("scales", weights.scales),
            ("minima", weights.minima),
            ("counters", weights.counters),
            ("bias", bias),
        ):
            self.register_buffer(name, tensor, persistent=False)
        self.codes: Tensor
        self.scales: Tensor
        self.minima: Tensor | None
        self.counters: Tensor
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        weights = IntegerMatrix(self.codes, self.scales, self.minima, self._per_word, self._zero, self.counters)
        out = x.new_empty(len(x), weights.outputs)
        integer_linear(x, weights, self.bias, out)
        return out


class EightBitLinear(nn.Module):
    """A matrix product of eight-bit weights and activations, which are rounded per row and group of inputs."""

    def __init__(self, weights: EightBitMatrix, bias: Tensor | None) -> None:
        super().__init__()
        for name, tensor in (
            ("values", weights.values),
            ("scales", weights.scales),
            ("counters", weights.counters),
            ("bias", bias),
        ):
            self.register_buffer(name, tensor, persistent=False)
        self.values: Tensor
        self.scales: Tensor
        self.counters: Tensor
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        weights = EightBitMatrix(self.values, self.scales, self.counters)
        rounded = torch.empty(x.shape, dtype=self.values.dtype, device=x.device)
        scales = torch.empty(len(x), len(self.scales), device=x.device)
        round_rows(x, weights.group, rounded, scales)
        out = x.new_empty(len(x), len(self.values))
        eight_bit_linear(rounded, scales, weights, self.bias, out)
        return out


@dataclass(frozen=True, slots=True)
class CudaPacking(Packing):
    """The packing of a GPU. The output layer is not packed, because logits are computed by PyTorch."""

    fp8: bool
    """Whether the GPU has instructions for fp8."""

    @property
    @override
    def units(self) -> Units:
        """Any: weights are packed as they are stored."""
        return Units()

    @override
    def pack(self, model: CausalLM, source: TensorSource, parts: Mapping[str, Parts], dtype: torch.dtype) -> None:
        kinds: Counter[str] = Counter()
        for path, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear | PackedLinear) or module is model.lm_head:
                continue
            weights = parts[f"{path}.weight"]
            packed = self._packed(source, list(weights)) if all(part.in_rows for part in weights.values()) else None
            if packed is None:
                continue
            biases = parts.get(f"{path}.bias", {})
            bias = {name: torch.empty(stored.shape, dtype=dtype) for name, stored in biases.items()}
            source.read(bias)
            whole = torch.cat(list(bias.values())) if bias else None
            linear = (
                IntegerLinear(packed, whole) if isinstance(packed, IntegerMatrix) else EightBitLinear(packed, whole)
            )
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, linear)
            kinds[type(linear).__name__] += 1
        if kinds:
            _log.info("weights_packed", matrices=dict(kinds))

    def _packed(self, source: TensorSource, names: Sequence[str]) -> IntegerMatrix | EightBitMatrix | None:
        """Returns tensors one below the other; None if no kernel can read them so."""
        try:
            scaled = [matrix for name in names if (matrix := source.eight_bits(name)) is not None]
            if len(scaled) == len(names) and (self.fp8 or scaled[0].values.dtype == torch.int8):
                return join_eight_bits(scaled)
            integers = [codes for name in names if (codes := source.integers(name)) is not None]
            return join_integers(integers) if len(integers) == len(names) else None
        except ValueError:  # groups of inputs that the kernels do not have
            return None


def join_eight_bits(parts: Sequence[Scaled]) -> EightBitMatrix:
    """Returns the rows of all parts.

    Raises:
        ValueError: the kernel has no such groups or dtype, or the parts differ in them.
    """
    dtype, inputs = parts[0].values.dtype, parts[0].values.shape[1]
    scales = [part.row_scales() for part in parts]
    groups = scales[0].shape[1]
    group = inputs // groups
    if dtype not in LARGEST or group * groups != inputs or (groups > 1 and parts[0].block[1] != group):
        raise ValueError(f"{dtype} in {groups} groups of {inputs} inputs")
    if any(
        part.values.dtype != dtype or part_scales.shape[1] != groups
        for part, part_scales in zip(parts, scales, strict=True)
    ):
        raise ValueError("parts of one matrix are quantized in different ways")
    eight_bit_tile(group)
    # A view as bytes, because not every dtype can be concatenated.
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(dtype)
    return EightBitMatrix(values, torch.cat(scales).T.contiguous(), counters_of(len(values), values.device))


def join_integers(parts: Sequence[IntegerWeights]) -> IntegerMatrix:
    """Returns the rows of all parts.

    Raises:
        ValueError: the kernel has no such groups, or the parts differ in them.
    """
    if len({part.scales.shape[1] for part in parts}) > 1:
        raise ValueError("parts of one matrix are quantized in different groups")
    zeros = {part.zero for part in parts}
    minima: Tensor | None = None
    if len(zeros) > 1 or any(part.minima is not None for part in parts):
        minima = torch.cat([_minima(part) for part in parts])
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales.float() for part in parts])
    zero = zeros.pop() if minima is None else 0
    return pack(codes, max(part.bits for part in parts), scales, zero, minima)


def _minima(part: IntegerWeights) -> Tensor:
    """Returns the minima of a part around a zero of 0."""
    lowest = part.scales.float() * -part.zero
    return lowest if part.minima is None else lowest + part.minima.float()
