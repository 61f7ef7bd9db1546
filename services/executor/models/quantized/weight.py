"""A weight that a checkpoint stores quantized, as several tensors."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import gcd, lcm
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from torch import Tensor

from pagewire.services.executor.models.quantized.layouts import BITS, IntegerWeights, is_group_size
from pagewire.services.executor.models.quantized.numbers import Scaled
from pagewire.shared.errors import ConfigurationError

FLOATS = ("F32", "BF16", "F16")
"""Dtypes of scales, as safetensors names them."""

MATRIX = (None, None)
"""The shape of any matrix."""

ShapePattern = Sequence[int | None]
"""A shape in which None stands for any size."""
C = TypeVar("C", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Header:
    """The description of a tensor in a file, before the tensor is read."""

    dtype: str
    """Dtype, by the name that safetensors has for it."""
    shape: tuple[int, ...]


class StoredTensors(Protocol):
    """The tensors of a checkpoint's files, as they are stored."""

    def names(self) -> Collection[str]:
        """Returns the names of all tensors."""

    def header(self, name: str) -> Header:
        """Returns the dtype and the shape of a tensor."""

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor."""


class Axis(NamedTuple):
    """The dimension of a weight that a dimension of a stored tensor goes along."""

    dim: int
    weights: int = 1
    """Numbers of the weight for which `stored` are stored."""
    stored: int = 1

    @property
    def unit(self) -> int:
        """The fewest numbers of the weight that are stored apart from others."""
        return self.weights // gcd(self.weights, self.stored)

    def stored_range(self, part: range, whole: int) -> range | None:
        """Returns the stored indices for a part of the weight's dimension of so many; None if it cuts a unit."""
        if part.start % self.unit or (part.stop % self.unit and part.stop < whole):
            return None
        return range(part.start * self.stored // self.weights, -(-part.stop * self.stored // self.weights))


class Content(Enum):
    """Content of a stored tensor that follows no dimension of its weight."""

    ORDER = "order"
    """The group of each input, where a group's inputs stand side by side."""
    SHAPE = "shape"
    """The shape of the weight."""


Layout = tuple[Axis | None, ...] | Content
"""Dimension of the weight that each dimension of a stored tensor follows; None: it follows none, or has one number."""
OUTPUTS, INPUTS = Axis(0), Axis(1)


def blocks(dim: int, size: int, whole: int) -> Axis | None:
    """Returns the axis of numbers that belong to blocks of `size` of a dimension of so many."""
    return None if size >= whole else Axis(dim, size)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight of the unquantized model, and how to read it."""

    shape: tuple[int, ...]
    parts: Mapping[str, Layout]
    """The tensors that are stored in its place, by name."""
    read: Callable[[], Tensor]
    """Reads the parts and returns the weight in a floating dtype that holds it."""
    integers: Callable[[], IntegerWeights] | None = None
    """Reads the parts and returns the weight as integers; None if `IntegerWeights` cannot express it."""
    eight_bits: Callable[[], Scaled] | None = None
    """Reads the parts and returns int8 or fp8 values without zeros; None unless activations are to be such too."""

    @property
    def units(self) -> tuple[int, int]:
        """The numbers of outputs and inputs of a matrix [N, K] between which it may be cut."""
        axes = [axis for layout in self.parts.values() if not isinstance(layout, Content) for axis in layout if axis]
        outputs, inputs = (lcm(*(axis.unit for axis in axes if axis.dim == dim)) for dim in (0, 1))
        return outputs, inputs

    @classmethod
    def of_codes(
        cls, shape: tuple[int, ...], parts: Mapping[str, Layout], read: Callable[[], Scaled], bits: int, group: int
    ) -> "QuantizedWeight":
        """Returns a weight [N, K] of codes of `bits` bits in groups of `group` inputs; 0: without order."""
        held = next(size for size in BITS if size >= bits)
        fits = group > 0 and shape[1] % group == 0 and is_group_size(group, shape[1])
        return cls(shape, parts, lambda: read().dequantize(), (lambda: read().integers(held)) if fits else None)


def parse_settings(kind: type[C], config: dict[str, Any]) -> C:
    """Returns a `quantization_config` as a struct of type `kind`.

    Raises:
        ConfigurationError: a value is missing, of the wrong type or unknown.
    """
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"quantization_config of config.json cannot be used ({error}): use another checkpoint of the model"
        ) from error


def modules_with(files: StoredTensors, suffix: str) -> list[str]:
    """Returns the names of the modules that have a tensor of the name `suffix`."""
    return [name.removesuffix(f".{suffix}") for name in files.names() if name.endswith(f".{suffix}")]


def require(files: StoredTensors, name: str, dtypes: Collection[str], *shapes: ShapePattern) -> tuple[int, ...]:
    """Returns the shape of a tensor that must be there, with one of `dtypes` and one of `shapes`.

    Raises:
        ConfigurationError: it is missing, or is another one.
    """
    if name not in files.names():
        raise ConfigurationError(
            f"the checkpoint misses tensor {name}, which its quantization_config asks for: fetch the model again"
        )
    header = files.header(name)
    if header.dtype not in dtypes or 0 in header.shape or not any(_fits(header.shape, shape) for shape in shapes):
        allowed = " or ".join(
            str(["any" if size is None else size for size in shape]).replace("'", "") for shape in shapes
        )
        raise ConfigurationError(
            f"tensor {name} is {header.dtype} {list(header.shape)}, and its quantization_config asks for "
            f"{' or '.join(dtypes)} {allowed}: fetch the model again"
        )
    return header.shape


def read_groups(files: StoredTensors, name: str, inputs: int, groups: int) -> Tensor:
    """Returns int64 [inputs], the group of each input.

    Raises:
        ConfigurationError: the tensor is missing, or names groups that are not there.
    """
    require(files, name, ("I32", "I64"), (inputs,))
    indices = files.tensor(name).long()
    if not 0 <= int(indices.min()) <= int(indices.max()) < groups:
        raise ConfigurationError(f"tensor {name} names groups that are not there: fetch the model again")
    return indices


def check_pattern(pattern: str) -> None:
    """Checks a regular expression of names of modules.

    Raises:
        ValueError: it is malformed.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression") from error


def _fits(shape: tuple[int, ...], wanted: ShapePattern) -> bool:
    return len(shape) == len(wanted) and all(size in (None, own) for own, size in zip(shape, wanted, strict=True))
