"""A weight that a checkpoint stores quantized, as several tensors."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight of the unquantized model, and how to read it."""

    shape: tuple[int, ...]
    parts: frozenset[str]
    """Names of the tensors that are stored in its place."""
    read: Callable[[], Tensor]
    """Reads the parts and returns the weight in a floating dtype that holds it."""
    integers: Callable[[], IntegerWeights] | None = None
    """Reads the parts and returns the weight as integers; None if `IntegerWeights` cannot express it."""
    eight_bits: Callable[[], Scaled] | None = None
    """Reads the parts and returns int8 or fp8 values without zeros; None unless activations are to be such too."""

    @classmethod
    def of_codes(
        cls, shape: tuple[int, ...], parts: Iterable[str], read: Callable[[], Scaled], bits: int, group: int
    ) -> "QuantizedWeight":
        """Returns a weight [N, K] of codes of `bits` bits in groups of `group` inputs; 0: without order."""
        held = next(size for size in BITS if size >= bits)
        fits = group > 0 and shape[1] % group == 0 and is_group_size(group, shape[1])
        return cls(
            shape, frozenset(parts), lambda: read().dequantize(), (lambda: read().integers(held)) if fits else None
        )


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
