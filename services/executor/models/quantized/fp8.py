"""Weights in eight-bit floats with a scale per tensor, per output or per block of outputs and inputs.

Source: DeepSeek-V3's and Qwen3's files (blocks, `weight_scale_inv`), vLLM's and ModelOpt's files (`weight_scale`).
"""

from typing import Any

import msgspec

from pagewire.services.executor.models.quantized.numbers import Scaled
from pagewire.services.executor.models.quantized.weight import (
    FLOATS,
    INPUTS,
    MATRIX,
    OUTPUTS,
    Layout,
    QuantizedWeight,
    StoredTensors,
    blocks,
    modules_with,
    parse_settings,
    require,
)

FP8 = ("F8_E4M3", "F8_E5M2")
SCALES = (*FLOATS, "F8_E8M0")
NAMES = ("weight_scale_inv", "weight_scale")
"""Names of the scales. Weights are multiplied by either, though the first is called an inverse."""


class Settings(msgspec.Struct, frozen=True):
    """`quantization_config` of the method fp8."""

    weight_block_size: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: one per tensor or per output."""

    def __post_init__(self) -> None:
        if self.weight_block_size is not None and min(self.weight_block_size) < 1:
            raise ValueError(f"weight_block_size is {list(self.weight_block_size)}")


def weights(config: dict[str, Any], files: StoredTensors) -> dict[str, QuantizedWeight]:
    """Returns the quantized weights of a checkpoint by their names in the unquantized one.

    Raises:
        ConfigurationError: the settings cannot be used, or a tensor is missing or does not fit them.
    """
    block = parse_settings(Settings, config).weight_block_size
    return {
        f"{module}.weight": fp8_weight(module, files, block)
        for module in modules_with(files, "weight")
        if files.header(f"{module}.weight").dtype in FP8
    }


def fp8_weight(module: str, files: StoredTensors, block: tuple[int, int] | None) -> QuantizedWeight:
    """Returns a weight whose scales belong to blocks of outputs and inputs, or to outputs or the tensor if it is None.

    Raises:
        ConfigurationError: a tensor is missing, or of another shape.
    """
    name = f"{module}.weight"
    shape = require(files, name, FP8, MATRIX)
    scale = next((full for part in NAMES if (full := f"{module}.{part}") in files.names()), f"{module}.{NAMES[1]}")
    if block is None:
        require(files, scale, SCALES, (), (1,), (1, 1), (shape[0],), (shape[0], 1))
    else:
        require(files, scale, SCALES, (-(-shape[0] // block[0]), -(-shape[1] // block[1])))

    def read() -> Scaled:
        scales = files.tensor(scale).float()
        return Scaled(files.tensor(name), scales.view(-1, 1) if block is None else scales, block=block or (1, 1))

    stored: tuple[int, ...] = files.header(scale).shape
    by_block: Layout = tuple(OUTPUTS if size == shape[0] > 1 and dim == 0 else None for dim, size in enumerate(stored))
    if block is not None:
        by_block = blocks(0, block[0], shape[0]), blocks(1, block[1], shape[1])
    parts: dict[str, Layout] = {name: (OUTPUTS, INPUTS), scale: by_block}
    return QuantizedWeight(shape, parts, lambda: read().dequantize(), eight_bits=read)
