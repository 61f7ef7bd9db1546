"""Reads the header of a GGUF file: metadata, and where each tensor lies. No tensor is read, no memory is taken for one.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length of the file is checked against
the bytes that are left before anything is built from it, so a broken or hostile file costs no memory.
"""

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pagewire.shared.errors import ConfigurationError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_LIMIT = 1 << 28
"""Bytes that a header may take. The largest vocabularies take some 20 MB."""
ALIGNMENT = 32
"""Of tensors, where the file names no other."""
MAX_DIMENSIONS = 4

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SMALLEST_ENTRY = 8 + 4 + 1
"""Bytes of a metadata entry: length of its key, type, value."""
_SMALLEST_TENSOR = 8 + 4 + 4 + 8
"""Bytes of a tensor's entry: length of its name, number of dimensions, type, offset."""


class TensorType(NamedTuple):
    """How numbers are stored: in blocks of `block` numbers that take `size` bytes."""

    name: str
    block: int
    size: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""By number in the file. The others are refused."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor and where it lies."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as PyTorch has it."""
    type: TensorType
    file: Path
    offset: int
    """Of its first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the last dimension."""
        return self.shape[-1] // self.type.block * self.type.size

    @property
    def rows(self) -> int:
        """Rows of all other dimensions together."""
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return count


class Strings(NamedTuple):
    """An array of strings that is not decoded yet."""

    number: int
    start: int
    """Of its first string in the file."""
    end: int


@dataclass(frozen=True)
class GgufModel:
    """A model in one file, or in several that are split from one."""

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Numbers, booleans and strings; arrays of numbers as numpy arrays, arrays of strings by `strings` only."""
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> "GgufModel":
        """Reads the headers of `path` and of the files that belong to it.

        Raises:
            ConfigurationError: a file is missing, broken or truncated, or holds what cannot be read.
        """
        header = _Header(path)
        files, tensors = (path, *_siblings(path, header.metadata)), dict(header.tensors)
        for number, file in enumerate(files[1:], 1):
            part = _Header(file)
            if part.metadata.get("split.no") != number or tensors.keys() & part.tensors.keys():
                raise ConfigurationError(f"{file} is not the part that its name says: fetch the model again")
            tensors |= part.tensors
        expected = header.metadata.get("split.tensors.count", len(tensors))
        if len(tensors) != expected:
            raise ConfigurationError(f"{path} and its parts hold {len(tensors)} of {expected} tensors: fetch it again")
        return cls(path, files, header.metadata, tensors)

    def strings(self, key: str) -> list[str]:
        """An array of strings of the metadata; empty where there is none.

        Raises:
            ConfigurationError: the key holds something else, or a string is not UTF-8.
        """
        found = self.metadata.get(key)
        if found is None:
            return []
        if not isinstance(found, Strings):
            raise ConfigurationError(f"{self.path} has a {key} that is no list of strings: fetch the model again")
        try:
            with self.path.open("rb") as file:
                file.seek(found.start)
                data = file.read(found.end - found.start)
            return [text.decode() for text in _split_strings(data, found.number)]
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.path}: {error.strerror}") from error
        except (struct.error, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{self.path} has a broken {key}: fetch the model again") from error


def model_name(path: Path) -> str:
    """The file's name without its endings."""
    found = _SPLIT.fullmatch(path.name)
    return found[1] if found else path.name.removesuffix(SUFFIX)


class _Header:
    """The header of one file."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        try:
            if not path.is_file():
                raise ConfigurationError(f"there is no file {path}")
            self._size = path.stat().st_size
            if self._size < len(MAGIC):
                self._refuse("is not a GGUF file")
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), min(self._size, HEADER_LIMIT), access=mmap.ACCESS_READ) as data,
            ):
                self._data = data
                self._read()
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path} has a name that is not UTF-8: fetch the model again") from error
        del self._data

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigurationError(f"{self._path} {what}: fetch the model again")

    def _read(self) -> None:
        if self._data[:4] != MAGIC:
            self._refuse("is not a GGUF file")
        self._position = 4
        version = self._number("I")
        if version & 0xFFFF == 0:
            self._refuse("is a big-endian GGUF file, which is not supported")
        if version not in VERSIONS:
            self._refuse(f"is GGUF version {version}, only {' and '.join(map(str, VERSIONS))} can be read")
        tensors = self._count("Q", _SMALLEST_TENSOR, "tensors")
        entries = self._count("Q", _SMALLEST_ENTRY, "metadata entries")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text()
            if key in self.metadata:
                self._refuse(f"has two entries {key!r}")
            self.metadata[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            self._refuse(f"has an alignment of {alignment!r}")
        start = -(-self._position // alignment) * alignment
        self.tensors = {tensor.name: self._placed(tensor, start) for tensor in found}
        if len(self.tensors) < len(found):
            self._refuse("has two tensors of the same name")

    def _tensor(self) -> StoredTensor:
        """One entry of the tensor table. Its offset counts from the end of the header."""
        name = self._text()
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._refuse(f"has a tensor {name!r} of {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            known = ", ".join(known.name for known in TENSOR_TYPES.values())
            raise ConfigurationError(
                f"{self._path} stores tensor {name!r} in ggml's type {number}, which cannot be read; these can: {known}"
            )
        if 0 in shape or shape[-1] % kind.block:
            self._refuse(f"has a tensor {name!r} of shape {list(shape)}, which {kind.name} cannot store")
        return StoredTensor(name, shape, kind, self._path, offset)

    def _placed(self, tensor: StoredTensor, start: int) -> StoredTensor:
        offset = start + tensor.offset
        end = offset + tensor.rows * tensor.row_bytes
        if end > self._size:
            self._refuse(f"is truncated: tensor {tensor.name!r} ends at byte {end} of {self._size}")
        return StoredTensor(tensor.name, tensor.shape, tensor.type, tensor.file, offset)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            self._refuse(f"has a metadata value of the unknown type {kind}")
        element = self._number("I")
        if element == _STRING:
            count = self._count("Q", 8, "strings in a list")
            start = self._position
            for _ in range(count):
                self._take(self._number("Q"))
            return Strings(count, start, self._position)
        if element not in _SCALARS:
            self._refuse(f"has a list of the unknown type {element}")
        dtype = np.dtype(_SCALARS[element]).newbyteorder("<")
        count = self._count("Q", dtype.itemsize, "numbers in a list")
        return np.frombuffer(self._data[self._take(count * dtype.itemsize) : self._position], dtype)

    def _count(self, form: str, smallest: int, what: str) -> int:
        """How many there are of what takes at least `smallest` bytes each."""
        count: int = self._number(form)
        if count * smallest > len(self._data) - self._position:
            self._refuse(f"is truncated or broken: it names {count} {what}")
        return count

    def _number(self, form: str) -> Any:
        layout = "<" + form
        position = self._take(struct.calcsize(layout))
        return struct.unpack_from(layout, self._data, position)[0]

    def _text(self) -> str:
        length = self._number("Q")
        position = self._take(length)
        return self._data[position : position + length].decode()

    def _take(self, length: int) -> int:
        """Goes on by `length` bytes; returns where they begin."""
        position = self._position
        if length > len(self._data) - position:
            self._refuse("is truncated: it ends within its header")
        self._position = position + length
        return position


def _split_strings(data: bytes, count: int) -> Iterator[bytes]:
    """The strings of an array, each behind its length."""
    position = 0
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, position)
        yield data[position + 8 : position + 8 + length]
        position += 8 + length


def _siblings(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The other files of a model that is split into several. They lie in the folder of the first, by its own name.

    Raises:
        ConfigurationError: `path` is not the first, or its name does not say how many there are.
    """
    count = metadata.get("split.count", 1)
    if type(count) is not int:
        raise ConfigurationError(f"{path} has a split.count that is no number: fetch the model again")
    if count <= 1:
        return []
    found = _SPLIT.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise ConfigurationError(
            f"{path} is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf"
        )
    if int(found[2]) != 1 or metadata.get("split.no") != 0:
        raise ConfigurationError(
            f"{path} is not the first of its {count} parts: give the one named -00001-of-{count:05}"
        )
    return [path.with_name(f"{found[1]}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
