"""Weights in four-bit floats with a power of two per 32 inputs, as gpt-oss stores its experts.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.models.quantized.numbers import (
    E2M1_BITS,
    E2M1_ZERO,
    Scaled,
    e2m1_codes,
    half_of_exponents,
)
from pagewire.services.executor.models.quantized.weight import (
    MATRIX,
    OUTPUTS,
    Axis,
    QuantizedWeight,
    StoredTensors,
    blocks,
    require,
)

GROUP = 32
"""Inputs that share a scale."""
BLOCKS, SCALES = "_blocks", "_scales"


def weights(_config: dict[str, Any], files: StoredTensors) -> dict[str, QuantizedWeight]:
    """Returns the quantized weights of a checkpoint by their names in the unquantized one.

    Raises:
        ConfigurationError: a tensor is missing or does not fit.
    """
    names = [name.removesuffix(BLOCKS) for name in files.names() if name.endswith(BLOCKS)]
    return {name: _experts(name, files) for name in names}


def _experts(name: str, files: StoredTensors) -> QuantizedWeight:
    """Returns the weights of all experts, [experts, inputs, outputs]: the other way round than they are stored."""
    packs, scales = name + BLOCKS, name + SCALES
    experts, outputs, groups, _ = require(files, packs, ("U8",), (None, None, None, GROUP // 2))
    require(files, scales, ("U8",), (experts, outputs, groups))

    def read() -> Tensor:
        # bf16 holds each value exactly: two bits of mantissa and a power of two.
        packed, factors = files.tensor(packs), half_of_exponents(files.tensor(scales))
        out = torch.empty(experts, groups * GROUP, outputs, dtype=torch.bfloat16)
        for expert in range(experts):
            codes = e2m1_codes(packed[expert]).flatten(1)
            out[expert] = Scaled(codes, factors[expert], torch.tensor([[E2M1_ZERO]]), (1, GROUP)).dequantize().T
        return out

    parts = {packs: (Axis(0), Axis(2), Axis(1, GROUP), None), scales: (Axis(0), Axis(2), Axis(1, GROUP))}
    return QuantizedWeight((experts, groups * GROUP, outputs), parts, read)


def packed_weight(module: str, files: StoredTensors) -> QuantizedWeight:
    """Returns a weight of the format mxfp4-pack-quantized of compressed-tensors.

    Raises:
        ConfigurationError: a tensor is missing, or of another shape.
    """
    packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"
    outputs, pairs = require(files, packed, ("U8",), MATRIX)
    inputs = 2 * pairs
    require(files, scale, ("U8", "F8_E8M0"), (outputs, -(-inputs // GROUP)))

    def read() -> Scaled:
        factors = half_of_exponents(files.tensor(scale).view(torch.uint8))
        return Scaled(e2m1_codes(files.tensor(packed)), factors, torch.tensor([[E2M1_ZERO]]), (1, GROUP))

    parts = {packed: (OUTPUTS, Axis(1, 2)), scale: (OUTPUTS, blocks(1, GROUP, inputs))}
    return QuantizedWeight.of_codes((outputs, inputs), parts, read, E2M1_BITS, GROUP)
