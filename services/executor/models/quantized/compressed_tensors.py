"""Weights as the library compressed-tensors stores them: integers and floats of 2 to 8 bits, packed or not.

Source: the files and the version 0.20 of compressed-tensors.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from pagewire.services.executor.models.quantized import mxfp4, nvfp4
from pagewire.services.executor.models.quantized.fp8 import FP8
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

Format = Literal[
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
]
PATTERN = "re:"
"""Prefix of an entry that is a pattern of names."""
Strategy = Literal["tensor", "channel", "group", "block", "tensor_group"]


class Numbers(msgspec.Struct, frozen=True):
    """The quantization of the weights of a group of modules."""

    num_bits: Literal[2, 3, 4, 5, 6, 7, 8] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Strategy | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if min(self.block_structure or (1, 1)) < 1 or (self.group_size or 1) < -1:
            raise ValueError("a group_size or block_structure is impossible")

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the outputs and inputs that share a scale in a weight of this shape."""
        if self.block_structure is not None:
            return self.block_structure
        if self.strategy == "tensor" or (self.strategy is None and self.group_size is None):
            return shape
        if self.group_size is None or self.group_size < 1:
            return 1, shape[1]
        return 1, self.group_size


class Scheme(msgspec.Struct, frozen=True):
    """A group of modules."""

    targets: tuple[str, ...]
    """Names of modules, patterns of such names behind "re:", or names of classes."""
    weights: Numbers | None = None
    input_activations: dict[str, Any] | None = None
    format: Format | None = None

    def __post_init__(self) -> None:
        for target in self.targets:
            if target.startswith(PATTERN):
                check_pattern(target.removeprefix(PATTERN))

    @property
    def numbers(self) -> Numbers:
        """The quantization of the weights."""
        return self.weights or Numbers()

    @property
    def rounds_activations(self) -> bool:
        """Whether activations are meant to be of eight bits in a product with these weights."""
        return (self.input_activations or {}).get("num_bits") == 8


class Settings(msgspec.Struct, frozen=True):
    """`quantization_config` of the method compressed-tensors."""

    config_groups: dict[str, Scheme]
    format: Format
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.sparsity_config or {}).get("format", "dense") != "dense":
            raise ValueError("sparse weights are not supported")
        if (self.transform_config or {}).get("config_groups"):
            raise ValueError("transforms of the weights are not supported")

    def scheme(self, module: str) -> Scheme:
        """Returns the group of a module: by its name, else by its class, which is Linear for all that have weights.

        Raises:
            ConfigurationError: it is in no group.
        """
        schemes = [scheme for scheme in self.config_groups.values() if scheme.weights is not None]
        for fits in (_names, _is_class):
            for scheme in schemes:
                if any(fits(target, module) for target in scheme.targets):
                    return scheme
        raise ConfigurationError(
            f"quantization_config of config.json has no config_group with weights for {module}: fetch the model again"
        )


def _names(target: str, module: str) -> bool:
    if target.startswith(PATTERN):
        return re.match(target.removeprefix(PATTERN), module) is not None
    return target == module


def _is_class(target: str, _module: str) -> bool:
    return target == "Linear"


def weights(config: dict[str, Any], files: StoredTensors) -> dict[str, QuantizedWeight]:
    """Returns the quantized weights of a checkpoint by their names in the unquantized one.

    Raises:
        ConfigurationError: the settings cannot be used, or a tensor is missing or does not fit them.
    """
    settings = parse_settings(Settings, config)
    matrices = {}
    plain = [module for module in modules_with(files, "weight") if files.header(f"{module}.weight").dtype in WHOLE]
    for module in [*modules_with(files, "weight_packed"), *plain]:
        scheme = settings.scheme(module)
        form = scheme.format or settings.format
        if form not in READERS:
            raise ConfigurationError(
                f"quantization_config of config.json names no format for {module}: fetch the model again"
            )
        matrices[f"{module}.weight"] = READERS[form](module, files, scheme)
    return matrices


WHOLE = ("I8", *FP8)
"""Dtypes of weights that are stored unpacked."""


def _floats(module: str, files: StoredTensors, scheme: Scheme) -> QuantizedWeight:
    """Returns a weight with an fp8 number per element."""
    name, scale = f"{module}.weight", f"{module}.weight_scale"
    shape = require(files, name, FP8, MATRIX)
    block, grid = _grid(scheme.numbers, shape)
    require(files, scale, FLOATS, *_shapes(grid))

    def read() -> Scaled:
        return Scaled(files.tensor(name), files.tensor(scale).view(grid), block=block)

    rounded = read if scheme.rounds_activations else None
    parts: dict[str, Layout] = {name: (OUTPUTS, INPUTS), scale: _along(files, scale, block, shape)}
    return QuantizedWeight(shape, parts, lambda: read().dequantize(), eight_bits=rounded)


def _bytes(module: str, files: StoredTensors, scheme: Scheme) -> QuantizedWeight:
    """Returns a weight with an int8 number per element."""
    numbers = scheme.numbers
    name, scale, zero = (f"{module}.{part}" for part in ("weight", "weight_scale", "weight_zero_point"))
    shape = require(files, name, ("I8",), MATRIX)
    block, grid = _grid(scheme.numbers, shape)
    require(files, scale, FLOATS, *_shapes(grid))
    names = [name, scale]
    if not numbers.symmetric:
        require(files, zero, ("I8",), *_shapes(grid))
        names.append(zero)

    def read() -> Scaled:
        values, scales = files.tensor(name), files.tensor(scale).view(grid)
        zeros = torch.zeros(1, 1, dtype=torch.int8) if numbers.symmetric else files.tensor(zero).view(grid)
        return Scaled(_unsigned(values), scales, _unsigned(zeros), block)

    def signed() -> Scaled:
        return Scaled(files.tensor(name), files.tensor(scale).view(grid), block=block)

    parts: dict[str, Layout] = {name: (OUTPUTS, INPUTS)}
    parts |= {grid_name: _along(files, grid_name, block, shape) for grid_name in names[1:]}
    weight = QuantizedWeight.of_codes(shape, parts, read, 8, block[1])
    return replace(weight, eight_bits=signed) if scheme.rounds_activations and numbers.symmetric else weight


def _unsigned(numbers: Tensor) -> Tensor:
    """Int8 -> uint8, larger by 128."""
    return numbers.view(torch.uint8) ^ 128


def _packed(module: str, files: StoredTensors, scheme: Scheme) -> QuantizedWeight:
    """Returns a weight of integers packed along the inputs, with zeros packed along the outputs."""
    numbers = scheme.numbers
    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    packed, scale, size, zero, group_of = (f"{module}.{name}" for name in names)
    bits, middle = numbers.num_bits, 1 << (numbers.num_bits - 1)
    require(files, size, ("I64", "I32"), (2,))
    shape = tuple(files.tensor(size).tolist())
    require(files, packed, ("I32",), (shape[0], -(-shape[1] * bits // 32)))
    block, grid = _grid(scheme.numbers, shape)
    reordered = group_of in files.names()
    if reordered and scale in files.names():  # inputs may be some of those that have the groups
        grid = grid[0], max(grid[1], *files.header(scale).shape[-1:])
    require(files, scale, FLOATS, *_shapes(grid))
    whole = grid == (1, 1)
    if not numbers.symmetric and whole:
        require(files, zero, ("I8",), *_shapes(grid))
    elif not numbers.symmetric:
        require(files, zero, ("I32",), (-(-grid[0] * bits // 32), grid[1]))
    spread = (block[0], shape[1]) if reordered else block
    parts: dict[str, Layout] = {
        packed: (OUTPUTS, Axis(1, 32, bits)),
        scale: _along(files, scale, spread, shape),
        size: Content.SHAPE,
    }
    if not numbers.symmetric:
        of_zeros = Axis(0, 32, bits), blocks(1, spread[1], shape[1])
        parts[zero] = _along(files, zero, spread, shape) if whole else of_zeros
    if reordered:
        order = read_groups(files, group_of, shape[1], grid[1])
        parts[group_of] = (INPUTS,)

    def read() -> Scaled:
        codes, scales = unpack(files.tensor(packed), bits, shape[1]), files.tensor(scale).view(grid)
        zeros = torch.full((1, 1), middle)
        if not numbers.symmetric:
            zeros = files.tensor(zero).view(grid) + middle if whole else unpack(files.tensor(zero).T, bits, grid[0]).T
        if not reordered:
            return Scaled(codes, scales, zeros, block)
        return Scaled(codes, scales[:, order], zeros.expand(grid)[:, order])

    return QuantizedWeight.of_codes(shape, parts, read, bits, 0 if reordered else block[1])


def _grid(numbers: Numbers, shape: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the block that shares a scale, and the number of such blocks in both dimensions."""
    rows, columns = numbers.block((shape[0], shape[1]))
    return (rows, columns), (-(-shape[0] // rows), -(-shape[1] // columns))


def _along(files: StoredTensors, name: str, block: tuple[int, int], shape: tuple[int, ...]) -> Layout:
    """Returns what the dimensions of stored scales or zeros go along."""
    both = blocks(0, block[0], shape[0]), blocks(1, block[1], shape[1])
    return both[: len(files.header(name).shape)]


def _shapes(grid: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes in which the scales of a grid are stored: some tools leave out dimensions of size 1."""
    flat = ((grid[0],),) if grid[1] == 1 else ()
    return (grid, *flat, ()) if grid == (1, 1) else (grid, *flat)


READERS: dict[str, Callable[[str, StoredTensors, Scheme], QuantizedWeight]] = {
    "int-quantized": _bytes,
    "float-quantized": _floats,
    "naive-quantized": lambda module, files, scheme: (_bytes if scheme.numbers.type == "int" else _floats)(
        module, files, scheme
    ),
    "pack-quantized": _packed,
    "nvfp4-pack-quantized": lambda module, files, _: nvfp4.packed_weight(module, files),
    "mxfp4-pack-quantized": lambda module, files, _: mxfp4.packed_weight(module, files),
}
