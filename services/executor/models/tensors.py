"""Reads a model's tensors from the files of a checkpoint, in safetensors or GGUF format."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire.services.executor.models.gguf_tensors import open_gguf
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.gguf import reader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED_DTYPES = ("F32", "BF16", "F16")


class TensorSource(Protocol):
    """Tensors by their names in Hugging Face's checkpoints."""

    def names(self) -> Collection[str]:
        """Returns the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor.

        Raises:
            ConfigurationError: the tensor has a dtype that is not supported.
        """

    def read(self, targets: Mapping[str, Tensor], advance: Callable[[int], object] = int) -> None:
        """Fills each tensor of `targets`, which has as many numbers as the stored one and any floating dtype.

        `advance` is called with the bytes of each part of a target that has been filled.

        Raises:
            ConfigurationError: a file cannot be read.
        """


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorSource]:
    """Opens a model folder or a GGUF file as a context manager, which closes the files.

    Raises:
        ConfigurationError: files are missing or broken.
    """
    with ExitStack() as stack:
        if path.suffix == reader.SUFFIX:
            yield stack.enter_context(open_gguf(path))
        else:
            yield SafetensorsFiles(path, stack)


class SafetensorsFiles:
    """A `TensorSource` of the memory-mapped files of a folder in Hugging Face format."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stored = {name: file for file in _open(folder, stack) for name in file.keys()}  # noqa: SIM118

    def names(self) -> Collection[str]:
        """See `TensorSource.names`."""
        return self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        view = self._stored[name].get_slice(name)
        if view.get_dtype() not in STORED_DTYPES:
            raise ConfigurationError(
                f"tensor {name} has dtype {view.get_dtype()}, only {', '.join(STORED_DTYPES)} load"
            )
        return tuple(view.get_shape())

    def read(self, targets: Mapping[str, Tensor], advance: Callable[[int], object] = int) -> None:
        """See `TensorSource.read`."""
        for name, out in targets.items():
            out.copy_(self._stored[name].get_tensor(name).view(out.shape))
            advance(out.nbytes)


def _open(folder: Path, stack: ExitStack) -> list[Any]:
    """Opens the checkpoint's files memory-mapped; the stack closes them."""
    files = []
    for path in _paths(folder):
        try:
            files.append(stack.enter_context(safe_open(path, framework="pt")))
        except FileNotFoundError as error:
            raise ConfigurationError(f"{folder} has no {path.name}: fetch the model again") from error
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"{path} is broken ({error}): fetch the model again") from error
    return files


def _paths(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return [folder / SINGLE]
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except OSError as error:
        raise ConfigurationError(f"cannot read {index}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{index} does not map tensors to files: fetch the model again") from error
    if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        raise ConfigurationError(f"{index} names files outside the folder: fetch the model again")
    return [folder / name for name in sorted(names)]
