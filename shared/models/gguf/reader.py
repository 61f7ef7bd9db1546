"""Reads the header of a GGUF file: the metadata and the offsets of the tensors, but no tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length in the file is checked against
the remaining bytes before memory is allocated for it, so a broken or malicious file cannot exhaust memory.
"""

import mmap
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pagewire.shared.errors import ConfigurationError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_LIMIT = 1 << 28
"""Maximum bytes of a header. The largest vocabularies take about 20 MB."""
ALIGNMENT = 32
"""Default alignment of tensors in bytes."""
MAX_DIMENSIONS = 4

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SMALLEST_ENTRY = 8 + 4 + 1
"""Minimum bytes of a metadata entry: length of the key, type, value."""
_SMALLEST_TENSOR = 8 + 4 + 4 + 8
"""Minimum bytes of a tensor's entry: length of the name, number of dimensions, type, offset."""


class TensorType(NamedTuple):
    """A format of numbers: blocks of `block` numbers, each of `size` bytes."""

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
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}
"""The supported types by their number in the file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its place in a file."""

    name: str
    shape: tuple[int, ...]
    """Shape in PyTorch's order, rows first."""
    type: TensorType
    file: Path
    offset: int
    """Offset of the first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is the last dimension."""
        return self.shape[-1] // self.type.block * self.type.size

    @property
    def rows(self) -> int:
        """Number of rows: the product of all other dimensions."""
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return count


class Strings(NamedTuple):
    """The place of an array of strings, which are not decoded."""

    number: int
    start: int
    """Offset of the first string in the file."""
    end: int


@dataclass(frozen=True)
class GgufModel:
    """A model in one file or split into several."""

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Metadata by key: numbers, booleans, strings, numpy arrays; `strings` reads arrays of strings."""
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> "GgufModel":
        """Reads the headers of `path` and of the other files of a split model, unless they were read and are unchanged.

        Raises:
            ConfigurationError: a file is missing, broken or truncated, or has unsupported content.
        """
        header = _header(path)
        files, tensors = (path, *_siblings(path, header.metadata)), dict(header.tensors)
        for number, file in enumerate(files[1:], 1):
            part = _header(file)
            if part.metadata.get("split.no") != number or tensors.keys() & part.tensors.keys():
                raise ConfigurationError(f"{file} is not the part that its name states: fetch the model again")
            tensors |= part.tensors
        expected = header.metadata.get("split.tensors.count", len(tensors))
        if len(tensors) != expected:
            raise ConfigurationError(f"{path} and its parts hold {len(tensors)} of {expected} tensors: fetch it again")
        return cls(path, files, header.metadata, tensors)

    def strings(self, key: str) -> list[str]:
        """Returns an array of strings of the metadata; empty if the key is missing.

        Raises:
            ConfigurationError: the value is not an array of strings, or a string is not UTF-8.
        """
        array = self._array(key)
        try:
            return [] if array is None else [text.decode() for text in _encoded(self.path, array)]
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{self.path} has a broken {key}: fetch the model again") from error

    def positions(self, key: str, texts: Collection[str]) -> Mapping[str, int]:
        """Returns the position of each of `texts` in an array of strings of the metadata that has it.

        Raises:
            ConfigurationError: the value is not an array of strings.
        """
        array = self._array(key)
        return {} if array is None else _positions(self.path, _changed_ns(self.path), array, frozenset(texts))

    def _array(self, key: str) -> Strings | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, Strings):
            raise ConfigurationError(f"{self.path} has a {key} that is no list of strings: fetch the model again")
        return value


@lru_cache(maxsize=8)
def _positions(path: Path, changed_ns: int, array: Strings, texts: frozenset[str]) -> Mapping[str, int]:
    """Returns the position of each text: a service asks for the same ones several times at its start, and each time
    takes 0.03 s."""
    del changed_ns
    encoded = {text.encode(): text for text in texts}
    return {encoded[text]: place for place, text in enumerate(_encoded(path, array)) if text in encoded}


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def _encoded(path: Path, array: Strings) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(array.start)
            data = file.read(array.end - array.start)
        return list(_split_strings(data, array.number))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except struct.error as error:
        raise ConfigurationError(f"{path} has a broken list of strings: fetch the model again") from error


def model_name(path: Path) -> str:
    """Returns the file's name without the suffix and the part number.

    >>> model_name(Path("llama-00001-of-00004.gguf"))
    'llama'
    """
    match = _SPLIT.fullmatch(path.name)
    return match[1] if match else path.name.removesuffix(SUFFIX)


def _header(path: Path) -> "_Header":
    try:
        state = path.stat()
    except OSError:
        return _Header(path)  # raises the error
    return _read_once(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _read_once(path: Path, changed_ns: int, size: int) -> "_Header":
    """Returns the header: a service asks for it several times at its start, and each time takes 0.1 s."""
    del changed_ns, size
    return _Header(path)


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
        entries_read = [self._tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            self._refuse(f"has an alignment of {alignment!r}")
        start = -(-self._position // alignment) * alignment
        self.tensors = {tensor.name: self._placed(tensor, start) for tensor in entries_read}
        if len(self.tensors) < len(entries_read):
            self._refuse("has two tensors of the same name")

    def _tensor(self) -> StoredTensor:
        """Reads one entry of the tensor table. The offset counts from the end of the header."""
        name = self._text()
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._refuse(f"has a tensor {name!r} of {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            names = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise ConfigurationError(
                f"{self._path} stores tensor {name!r} in ggml's type {number}, which cannot be read; these can: {names}"
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
            self._skip_strings(count)
            return Strings(count, start, self._position)
        if element not in _SCALARS:
            self._refuse(f"has a list of the unknown type {element}")
        dtype = np.dtype(_SCALARS[element]).newbyteorder("<")
        count = self._count("Q", dtype.itemsize, "numbers in a list")
        return np.frombuffer(self._data[self._take(count * dtype.itemsize) : self._position], dtype)

    def _skip_strings(self, count: int) -> None:
        """Advances by so many strings, of which a vocabulary has a hundred thousand."""
        data, position, unpack = self._data, self._position, struct.Struct("<Q").unpack_from
        last = len(data) - 8
        for _ in range(count):
            if position > last:
                self._refuse("is truncated: it ends within its header")
            position += 8 + unpack(data, position)[0]
        self._take(position - self._position)

    def _count(self, form: str, smallest: int, what: str) -> int:
        """Reads the number of items of at least `smallest` bytes each, and checks that they fit into the file."""
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
        """Advances by `length` bytes; returns the position before."""
        position = self._position
        if length > len(self._data) - position:
            self._refuse("is truncated: it ends within its header")
        self._position = position + length
        return position


def _split_strings(data: bytes, count: int) -> Iterator[bytes]:
    """Yields the strings of an array. The length precedes each string."""
    position, unpack = 0, struct.Struct("<Q").unpack_from
    for _ in range(count):
        (length,) = unpack(data, position)
        begin, position = position + 8, position + 8 + length
        yield data[begin:position]


def _siblings(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """Returns the other files of a split model, which are in the folder of the first and have its name.

    Raises:
        ConfigurationError: `path` is not the first file, or its name does not state the number of files.
    """
    count = metadata.get("split.count", 1)
    if type(count) is not int:
        raise ConfigurationError(f"{path} has a split.count that is no number: fetch the model again")
    if count <= 1:
        return []
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ConfigurationError(
            f"{path} is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf"
        )
    if int(match[2]) != 1 or metadata.get("split.no") != 0:
        raise ConfigurationError(
            f"{path} is not the first of its {count} parts: give the one named -00001-of-{count:05}"
        )
    return [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
