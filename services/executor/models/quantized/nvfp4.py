"""Weights in four-bit floats with an fp8 scale per 16 inputs and a float32 scale per tensor.

Source: the files of NVIDIA's ModelOpt, and of compressed-tensors in the format nvfp4-pack-quantized.
"""

from typing import Any, Literal

import msgspec
import torch

from pagewire.services.executor.models.quantized.fp8 import FP8, fp8_weight
from pagewire.services.executor.models.quantized.numbers import E2M1_BITS, E2M1_ZERO, Scaled, e2m1_codes
from pagewire.services.executor.models.quantized.weight import (
    MATRIX,
    OUTPUTS,
    Axis,
    Layout,
    QuantizedWeight,
    StoredTensors,
    blocks,
    modules_with,
    parse_settings,
    require,
)

GROUP = 16
"""Inputs that share a scale."""


class Settings(msgspec.Struct, frozen=True):
    """`quantization_config` of the method modelopt."""

    quant_algo: Literal["NVFP4", "FP8"]


def weights(config: dict[str, Any], files: StoredTensors) -> dict[str, QuantizedWeight]:
    """Returns the quantized weights of a checkpoint of ModelOpt by their names in the unquantized one.

    Raises:
        ConfigurationError: the settings cannot be used, or a tensor is missing or does not fit them.
    """
    algorithm = parse_settings(Settings, config).quant_algo
    matrices = {}
    for module in modules_with(files, "weight"):
        dtype = files.header(f"{module}.weight").dtype
        if algorithm == "FP8" and dtype in FP8:
            matrices[f"{module}.weight"] = fp8_weight(module, files, block=None)
        elif algorithm == "NVFP4" and dtype == "U8":
            matrices[f"{module}.weight"] = _weight(files, module, "weight", "weight_scale_2")
    return matrices


def packed_weight(module: str, files: StoredTensors) -> QuantizedWeight:
    """Returns a weight of the format nvfp4-pack-quantized of compressed-tensors.

    Raises:
        ConfigurationError: a tensor is missing, or of another shape.
    """
    return _weight(files, module, "weight_packed", "weight_global_scale")


def _weight(files: StoredTensors, module: str, packed: str, whole: str) -> QuantizedWeight:
    """Returns the weight whose codes and scale per tensor have these names; by a global scale they are divided."""
    names = [f"{module}.{part}" for part in (packed, "weight_scale", whole)]
    outputs, pairs = require(files, names[0], ("U8",), MATRIX)
    inputs = 2 * pairs
    require(files, names[1], ("F8_E4M3",), (outputs, -(-inputs // GROUP)))
    require(files, names[2], ("F32",), (), (1,))

    def read() -> Scaled:
        codes, scales, scale = map(files.tensor, names)
        scales = scales.float() / scale if whole == "weight_global_scale" else scales.float() * scale
        return Scaled(e2m1_codes(codes), scales / 2, torch.tensor([[E2M1_ZERO]]), (1, GROUP))

    number: Layout = (None,) * len(files.header(names[2]).shape)
    layouts: tuple[Layout, ...] = ((OUTPUTS, Axis(1, 2)), (OUTPUTS, blocks(1, GROUP, inputs)), number)
    parts = dict(zip(names, layouts, strict=True))
    return QuantizedWeight.of_codes((outputs, inputs), parts, read, E2M1_BITS, GROUP)
