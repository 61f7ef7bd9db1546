"""Weights as GPTQ's tools store them: packed along the inputs, scales and zeros per group of inputs.

Source: Frantar et al., 2022, and the files of AutoGPTQ and GPTQModel.
"""

import re
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
    Content,
    Layout,
    QuantizedWeight,
    StoredTensors,
    blocks,
    check_pattern,
    modules_with,
    parse_settings,
    read_groups,
    require,
)
from pagewire.shared.errors import ConfigurationError

Bits = Literal[2, 3, 4, 8]
SIGNS = ("+:", "-:")
"""Prefixes of patterns of modules: changed settings, and none."""


class Settings(msgspec.Struct, frozen=True):
    """`quantization_config` of the method gptq."""

    bits: Bits
    group_size: int = -1
    """Inputs that share a scale; -1: all."""
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    """Name of the layout; "gptq" stores each zero minus one, "gptq_v2" the zero itself."""
    pack_dtype: Literal["int32"] = "int32"
    sym: bool = False
    """Whether all zeros are the middle code."""
    dynamic: dict[str, dict[str, Any]] | None = None
    """Settings of the modules whose names match a pattern behind "+:"; "-:" leaves them unquantized."""

    def __post_init__(self) -> None:
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}")
        for pattern in self.dynamic or {}:
            check_pattern(pattern[2:] if pattern.startswith(SIGNS) else pattern)

    def of(self, module: str) -> "Settings":
        """Returns the settings of a module."""
        for pattern, changes in (self.dynamic or {}).items():
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
                known = {name: value for name, value in changes.items() if name in ("bits", "group_size", "sym")}
                return parse_settings(Settings, msgspec.structs.asdict(self) | known)
        return self


def weights(config: dict[str, Any], files: StoredTensors) -> dict[str, QuantizedWeight]:
    """Returns the quantized weights of a checkpoint by their names in the unquantized one.

    Raises:
        ConfigurationError: the settings cannot be used, or a tensor is missing or does not fit them.
    """
    settings = parse_settings(Settings, config)
    return {
        f"{module}.weight": _weight(settings.of(module), module, files) for module in modules_with(files, "qweight")
    }


def _weight(settings: Settings, module: str, files: StoredTensors) -> QuantizedWeight:
    bits, names = settings.bits, {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    words, outputs = require(files, names["qweight"], ("I32",), MATRIX)
    inputs = words * 32 // bits
    group = inputs if settings.group_size == -1 else settings.group_size
    groups = -(-inputs // group)
    reordered = names["g_idx"] in files.names()
    if reordered and names["scales"] in files.names():  # inputs may be some of those that have the groups
        groups = max(groups, *files.header(names["scales"]).shape[:1])
    require(files, names["scales"], FLOATS, (groups, outputs))
    require(files, names["qzeros"], ("I32",), (groups, -(-outputs * bits // 32)))
    group_of = order = torch.arange(inputs) // group
    if reordered:
        group_of = read_groups(files, names["g_idx"], inputs, groups)
    in_order = torch.equal(group_of, order)

    def read() -> Scaled:
        codes = unpack(files.tensor(names["qweight"]).T, bits, inputs)
        zeros = _zeros(files.tensor(names["qzeros"]), settings, outputs, module).T
        scales = files.tensor(names["scales"]).T
        if in_order:
            return Scaled(codes, scales, zeros, (1, group))
        return Scaled(codes, scales[:, group_of], zeros[:, group_of])

    by_group = blocks(1, group, inputs) if in_order else None
    parts: dict[str, Layout] = {
        names["qweight"]: (Axis(1, 32, bits), OUTPUTS),
        names["qzeros"]: (by_group, Axis(0, 32, bits)),
        names["scales"]: (by_group, OUTPUTS),
    }
    if reordered:
        parts[names["g_idx"]] = Content.ORDER if in_order else (INPUTS,)
    return QuantizedWeight.of_codes((outputs, inputs), parts, read, bits, group if in_order else 0)


def _zeros(packed: Tensor, settings: Settings, count: int, module: str) -> Tensor:
    """Returns the true zeros, uint8 [groups, count], of int32 [groups, words].

    Some tools store symmetric zeros as they are, although they name a layout that stores each minus one.

    Raises:
        ConfigurationError: a zero of symmetric weights is not the middle code.
    """
    zeros = _stored_zeros(packed, settings.bits, count, settings.checkpoint_format)
    middle = 1 << settings.bits - 1
    if not settings.sym or bool((zeros == middle).all()):
        return zeros
    as_they_are = unpack(packed, settings.bits, count)
    if bool((as_they_are == middle).all()):
        return as_they_are
    raise ConfigurationError(
        f"{module}.qzeros has zeros other than {middle}, although quantization_config says sym: "
        "quantize the model again"
    )


def _stored_zeros(packed: Tensor, bits: int, count: int, form: str) -> Tensor:
    """Int32 [groups, words] -> uint8 [groups, count], the zeros that the layout `form` states."""
    if form == "gptq_v2":
        return unpack(packed, bits, count)
    if 32 % bits:
        return unpack(packed, bits, count) + 1 & (1 << bits) - 1
    # Whole words, because GPTQModel subtracts from whole words: a zero of 0 has borrowed from the next one.
    return unpack(packed + 0xFFFFFFFF // ((1 << bits) - 1), bits, count)
