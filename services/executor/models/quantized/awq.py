"""Weights as AWQ's tools store them: four bits, packed along the outputs in the order of its kernels.

Source: Lin et al., 2023, and the files of AutoAWQ's version "gemm".
"""

from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from pagewire.services.executor.models.quantized.numbers import Scaled, unpack
from pagewire.services.executor.models.quantized.weight import (
    FLOATS,
    INPUTS,
    MATRIX,
    OUTPUTS,
    Axis,
    QuantizedWeight,
    StoredTensors,
    blocks,
    modules_with,
    parse_settings,
    require,
)

BITS = 4
PER_WORD = 32 // BITS
"""Numbers in a word."""
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight successive outputs."""


class Settings(msgspec.Struct, frozen=True):
    """`quantization_config` of the method awq."""

    bits: Literal[4] = 4
    w_bit: Literal[4] = 4
    group_size: int | None = None
    """Inputs that share a scale; -1: all."""
    q_group_size: int | None = None
    """Name of the field above in early files."""
    zero_point: Literal[True] = True
    version: Literal["gemm", "GEMM"] = "gemm"

    def __post_init__(self) -> None:
        if self.group != -1 and self.group < 1:
            raise ValueError(f"group_size is {self.group}")

    @property
    def group(self) -> int:
        """Inputs that share a scale; -1: all."""
        return next((size for size in (self.group_size, self.q_group_size) if size is not None), 128)


def weights(config: dict[str, Any], files: StoredTensors) -> dict[str, QuantizedWeight]:
    """Returns the quantized weights of a checkpoint by their names in the unquantized one.

    Raises:
        ConfigurationError: the settings cannot be used, or a tensor is missing or does not fit them.
    """
    settings = parse_settings(Settings, config)
    return {f"{module}.weight": _weight(settings, module, files) for module in modules_with(files, "qweight")}


def _weight(settings: Settings, module: str, files: StoredTensors) -> QuantizedWeight:
    packed, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    inputs, words = require(files, packed, ("I32",), MATRIX)
    outputs = words * PER_WORD
    group = inputs if settings.group == -1 else settings.group
    groups = -(-inputs // group)
    require(files, zeros, ("I32",), (groups, words))
    require(files, scales, FLOATS, (groups, outputs))

    def read() -> Scaled:
        codes, offsets = (_unpack(files.tensor(name)).T for name in (packed, zeros))
        return Scaled(codes.contiguous(), files.tensor(scales).T, offsets, (1, group))

    by_group, by_word = blocks(1, group, inputs), Axis(0, PER_WORD)
    parts = {packed: (INPUTS, by_word), zeros: (by_group, by_word), scales: (by_group, OUTPUTS)}
    return QuantizedWeight.of_codes((outputs, inputs), parts, read, BITS, group)


def _unpack(words: Tensor) -> Tensor:
    """Int32 [rows, words] -> uint8 [rows, outputs]."""
    numbers = unpack(words, BITS, words.shape[1] * PER_WORD).view(len(words), -1, PER_WORD)
    return numbers[..., torch.tensor(ORDER)].flatten(1)
