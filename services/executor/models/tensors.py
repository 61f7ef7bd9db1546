"""Reads a model's tensors from the files of a checkpoint, in safetensors or GGUF format."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import structlog
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from pagewire.services.executor.models.gguf.tensors import open_gguf
from pagewire.services.executor.models.quantized.cut_files import CutFiles
from pagewire.services.executor.models.quantized.formats import find_format
from pagewire.services.executor.models.quantized.layouts import IntegerWeights
from pagewire.services.executor.models.quantized.numbers import Scaled
from pagewire.services.executor.models.quantized.weight import FLOATS, Header, QuantizedWeight, StoredTensors
from pagewire.services.executor.models.shard import Slices, Units, largest_units
from pagewire.services.executor.models.stored_names import decoder_names, with_prefix
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf import reader
from pagewire.shared.models.model_folder import INDEX, SINGLE
from pagewire.shared.progress import shown

OF_ACTIVATIONS = frozenset(
    {
        "activation_scale",
        "input_global_scale",
        "input_scale",
        "input_scale_ub",
        "input_zero_point",
        "k_scale",
        "output_scale",
        "output_zero_point",
        "q_scale",
        "v_scale",
    }
)
"""Last names of the tensors by which other servers quantize activations and KV caches. They are not read."""

_PART = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_POINTER = b"version https://git-lfs"

_log = structlog.get_logger()


class TensorSource(Protocol):
    """Tensors by their names in Hugging Face's checkpoints."""

    def names(self) -> Collection[str]:
        """Returns the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor.

        Raises:
            ConfigurationError: the tensor has a dtype that is not supported.
        """

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fills each tensor of `targets`, which has as many numbers as the stored one and any floating dtype.

        Raises:
            ConfigurationError: a file cannot be read.
        """

    def integers(self, name: str) -> IntegerWeights | None:
        """Returns a stored matrix [N, K] as integers, equal to what `read` gives but for rounding.

        None: it is not stored as integers, or in a way that `IntegerWeights` cannot express; `read` has it anyway.

        Raises:
            ConfigurationError: a file cannot be read.
        """

    def eight_bits(self, name: str) -> Scaled | None:
        """Returns a stored matrix [N, K] whose product is meant to be one of int8 or fp8 numbers on both sides.

        Its values are int8 or fp8, without zeros. None: the matrix is stored otherwise; `read` has it anyway.

        Raises:
            ConfigurationError: a file cannot be read.
        """

    def units(self, slices: Mapping[str, Slices]) -> Units:
        """Returns the units in which tensors may be cut along the dimensions that are keys of their `slices`."""

    def cut(self, slices: Mapping[str, Slices]) -> "TensorSource":
        """Returns the source of parts of the tensors that `slices` names, of each the indices that it has.

        Raises:
            ConfigurationError: a slice cuts numbers that are stored together.
        """

    def uncut(self, name: str) -> tuple["TensorSource", Slices]:
        """Returns the source of all of a tensor, and the indices of it that this source has."""


@contextmanager
def open_tensors(
    path: Path, quantization: dict[str, Any] | None = None, names: Collection[str] = ()
) -> Iterator[TensorSource]:
    """Opens a model folder or a GGUF file as a context manager, which closes the files.

    Args:
        path: the folder or file.
        quantization: the `quantization_config` of a folder; None if its weights are not quantized.
        names: the tensors that the model needs. A GGUF file has others, and a folder may lack their prefix.

    Raises:
        ConfigurationError: files are missing or broken, or the quantized weights cannot be used.
    """
    with ExitStack() as stack:
        if path.suffix == reader.SUFFIX:
            yield stack.enter_context(open_gguf(path, names))
        else:
            yield stack.enter_context(open_folder(path, quantization, names))


@contextmanager
def open_folder(
    folder: Path, quantization: dict[str, Any] | None, names: Collection[str] = ()
) -> Iterator["FolderTensors"]:
    """Opens a model folder as a context manager, which closes the files; see `open_tensors`."""
    with ExitStack() as stack:
        files = SafetensorsFiles(folder, stack, names)
        yield FolderTensors(files, quantization)


class FolderTensors(TensorSource):
    """The tensors of a folder, whose weights may be quantized."""

    def __init__(self, files: StoredTensors, quantization: dict[str, Any] | None) -> None:
        """`quantization` is the `quantization_config` of config.json.

        Raises:
            ConfigurationError: the quantized weights cannot be used.
        """
        weights: Mapping[str, QuantizedWeight] = {}
        if quantization is not None:
            weights = find_format(quantization)(quantization, files)
        self._files, self._quantization, self._weights = files, quantization, weights
        self._whole, self._slices = self, dict[str, Slices]()
        stored = set(files.names())
        if weights:
            stored -= frozenset().union(*(weight.parts for weight in weights.values()))
            stored = {name for name in stored if name.rpartition(".")[2] not in OF_ACTIVATIONS}
        self._names = stored | weights.keys()

    @override
    def names(self) -> Collection[str]:
        return self._names

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._weights:
            return self._weights[name].shape
        header = self._files.header(name)
        if header.dtype not in FLOATS:
            raise ConfigurationError(
                f"tensor {name} has dtype {header.dtype}, which its config.json does not explain: only "
                f"{', '.join(FLOATS)} load without a quantization_config"
            )
        return header.shape

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor; a quantized one in a floating dtype that holds it exactly."""
        return self._weights[name].read() if name in self._weights else self._files.tensor(name)

    @override
    def read(self, targets: Mapping[str, Tensor]) -> None:
        if quantized := sum(name in self._weights for name in targets):
            _log.info("weights_dequantized", matrices=quantized)
        for name, out in shown(targets.items(), "loading weights"):
            out.copy_(self.tensor(name).reshape(out.shape))

    @override
    def integers(self, name: str) -> IntegerWeights | None:
        weight = self._weights.get(name)
        return None if weight is None or weight.integers is None else weight.integers()

    @override
    def eight_bits(self, name: str) -> Scaled | None:
        weight = self._weights.get(name)
        return None if weight is None or weight.eight_bits is None else weight.eight_bits()

    @override
    def units(self, slices: Mapping[str, Slices]) -> Units:
        return largest_units(
            Units(*(unit if dim in slices[name] else 1 for dim, unit in enumerate(weight.units)))
            for name, weight in self._weights.items()
            if name in slices
        )

    @override
    def cut(self, slices: Mapping[str, Slices]) -> "FolderTensors":
        part = FolderTensors(CutFiles(self._files, self._weights, slices), self._quantization)
        part._whole, part._slices = self, dict(slices)
        return part

    @override
    def uncut(self, name: str) -> tuple["FolderTensors", Slices]:
        return self._whole, self._slices.get(name, {})


class SafetensorsFiles(StoredTensors):
    """The decoder's tensors in the memory-mapped files of a folder in Hugging Face format."""

    def __init__(self, folder: Path, stack: ExitStack, needed: Collection[str] = ()) -> None:
        self._files = {name: file for file in _open(folder, stack) for name in file.keys()}  # noqa: SIM118
        self._names = with_prefix(decoder_names(self._files), needed)

    @override
    def names(self) -> Collection[str]:
        return self._names.keys()

    @override
    def header(self, name: str) -> Header:
        stored = self._names[name]
        view = self._files[stored].get_slice(stored)
        return Header(view.get_dtype(), tuple(view.get_shape()))

    @override
    def tensor(self, name: str) -> Tensor:
        stored = self._names[name]
        tensor: Tensor = self._files[stored].get_tensor(stored)
        return tensor


def _open(folder: Path, stack: ExitStack) -> list[Any]:
    """Opens the checkpoint's files memory-mapped; the stack closes them."""
    files = []
    for path in _paths(folder):
        try:
            files.append(stack.enter_context(safe_open(path, framework="pt")))
        except FileNotFoundError as error:
            raise ConfigurationError(f"{folder} has no {path.name}: fetch the model again") from error
        except (OSError, SafetensorError) as error:
            if _is_pointer(path):
                raise ConfigurationError(
                    f"{path} is a pointer of Git LFS in place of the weights: run git lfs pull in {folder}"
                ) from error
            raise ConfigurationError(f"{path} is broken ({error}): fetch the model again") from error
    return files


def _paths(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return _without_index(folder)
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except OSError as error:
        raise ConfigurationError(f"cannot read {index}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{index} does not map tensors to files: fetch the model again") from error
    if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        raise ConfigurationError(f"{index} names files outside the folder: fetch the model again")
    return [folder / name for name in sorted(names)]


def _without_index(folder: Path) -> list[Path]:
    """Returns the one file of a checkpoint, or its parts.

    Raises:
        ConfigurationError: a part is missing, or there are weights in another format alone.
    """
    single = folder / SINGLE
    parts = {int(match[1]): file for file in folder.iterdir() if (match := _PART.fullmatch(file.name))}
    if single.exists() or not parts:
        if not single.exists() and any(folder.glob("*.bin")):
            raise ConfigurationError(
                f"{folder} has its weights in PyTorch's own format, which is not read because it can hold code: "
                f"write them as {SINGLE} by transformers' save_pretrained"
            )
        return [single]
    count = max(int(match[2]) for file in parts.values() if (match := _PART.fullmatch(file.name)))
    if missing := sorted(set(range(1, count + 1)) - parts.keys()):
        raise ConfigurationError(f"{folder} lacks part {missing[0]} of {count} of its weights: fetch the model again")
    return [parts[number] for number in sorted(parts)]


def _is_pointer(file: Path) -> bool:
    """Returns whether a file is what Git LFS leaves in place of a large file."""
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER
