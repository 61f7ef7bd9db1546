"""The tensors of a GGUF file, with the names and the row order of Hugging Face's checkpoints."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from gguf import quants
from torch import Tensor

from pagewire.services.executor.models.gguf.names import Recipe, Rows, find_recipes
from pagewire.services.executor.models.quantized.gguf_blocks import unpack_integers
from pagewire.services.executor.models.quantized.layouts import IntegerWeights
from pagewire.services.executor.models.quantized.numbers import Scaled
from pagewire.services.executor.models.shard import Slices, Units, cut_shape, largest_units, take
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.config import ignored_keys, read_config
from pagewire.shared.models.gguf.reader import GgufModel, StoredTensor, TensorType
from pagewire.shared.progress import shown

CHUNK = 1 << 17
"""Numbers that are dequantized at a time: numpy's temporary arrays then fit into a core's cache."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""GGUF types that PyTorch has as dtypes."""

_log = structlog.get_logger()

Blocks = npt.NDArray[np.uint8]
"""[rows, bytes per row], packed as in the file."""


@contextmanager
def open_gguf(path: Path, names: Collection[str]) -> Iterator["GgufTensors"]:
    """Opens a GGUF file and its parts as a context manager, which closes the files.

    Args:
        path: the file.
        names: the tensors that its model has in Hugging Face's checkpoints.

    Raises:
        ConfigurationError: a file is missing or broken, or its architecture is not supported.
    """
    model = GgufModel.open(path)
    try:
        recipes = find_recipes(model, read_config(model), names)
    except RuntimeError as error:  # what torch says of an impossible shape
        raise ConfigurationError(f"{path} has metadata that contradicts its tensors: fetch the model again") from error
    if ignored := ignored_keys(model):
        _log.warning("gguf_keys_ignored", file=str(path), keys=ignored)
    with ExitStack() as stack:
        try:
            files = {file: stack.enter_context(file.open("rb")).fileno() for file in model.files}
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        yield GgufTensors(recipes, files)


class GgufTensors:
    """The tensors of a GGUF model, as a `TensorSource`. Those that the model has no use for keep their names."""

    def __init__(
        self, recipes: Mapping[str, Recipe], files: Mapping[Path, int], slices: Mapping[str, Slices] | None = None
    ) -> None:
        """`slices` are the indices of tensors that `recipes` has whole; the others are cut already."""
        self._recipes, self._files, self._slices = recipes, files, slices or {}
        self._source: GgufTensors = self
        self._cut: Mapping[str, Slices] = {}

    def names(self) -> Collection[str]:
        """Returns the names of all tensors, as Hugging Face has them."""
        return self._recipes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor.

        Raises:
            ConfigurationError: stored tensors do not fit together.
        """
        try:
            return cut_shape(self._recipes[name].shape, self._slices.get(name, {}))
        except RuntimeError as error:
            raise _contradiction(name, error) from error

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fills each of `targets`. Parts of tensors are dequantized in parallel on all cores."""
        kinds = Counter(
            kind
            for name in targets
            for part in self._recipes[name].parts[:1]
            if (kind := part.stored.type.name) not in PLAIN
        )
        if kinds:
            _log.info("weights_dequantized", matrices=dict(kinds))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            parts = [part for name, out in targets.items() for part in self._parts(name, out)]
            for done in shown([threads.submit(part) for part in parts], "loading weights"):
                done.result()

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor in float32 or the file's own unquantized dtype."""
        recipe = self._recipes[name]
        parts = [self._whole(rows) for rows in recipe.parts]
        try:
            whole = parts[0] if recipe.build is None else recipe.build(tuple(parts))
            return take(whole, self._slices.get(name, {}))
        except RuntimeError as error:
            raise _contradiction(name, error) from error

    def integers(self, name: str) -> IntegerWeights | None:
        """Returns a matrix as integers; None if it is stored otherwise."""
        recipe = self._recipes[name]
        if recipe.build is not None or len(recipe.shape) != 2 or recipe.parts[0].stored.type.name in PLAIN:
            return None
        rows = recipe.parts[0]
        weights = unpack_integers(self._blocks(rows, 0, rows.number), rows.stored.type)
        return weights if rows.order is None or weights is None else weights.rows(rows.order.argsort())

    def eight_bits(self, name: str) -> Scaled | None:
        """Returns None: no type of this format says how activations are stored."""
        return None

    def units(self, slices: Mapping[str, Slices]) -> Units:
        """Returns the units in which tensors may be cut along the dimensions that are keys of their `slices`."""
        cut = [self._recipes[name] for name, dims in slices.items() if 1 in dims and name in self._recipes]
        return largest_units(Units(1, one.parts[0].stored.type.block) for one in cut if one.build is None)

    def cut(self, slices: Mapping[str, Slices]) -> "GgufTensors":
        """Returns the source of parts of the tensors that `slices` names.

        Raises:
            ConfigurationError: a slice cuts numbers that are stored together.
        """
        recipes, later = {}, {}
        for name, dims in slices.items():
            recipe = self._recipes[name]
            if recipe.build is not None or len(recipe.shape) != 2:
                recipes[name], later[name] = recipe, dims
                continue
            rows = recipe.parts[0].cut(dims)
            block = rows.stored.type.block
            if rows.columns is not None and (rows.columns.start % block or rows.columns.stop % block):
                raise ConfigurationError(
                    f"tensor {name} has {block} numbers together, between which it cannot be cut: set another "
                    "tensor-parallel-size"
                )
            recipes[name] = Recipe((rows,))
        part = GgufTensors(recipes, self._files, later)
        part._source, part._cut = self, slices
        return part

    def uncut(self, name: str) -> tuple["GgufTensors", Slices]:
        """Returns the source of all of a tensor, and the indices of it that this source has."""
        return self._source, self._cut.get(name, {})

    def _parts(self, name: str, out: Tensor) -> Iterator[Callable[[], None]]:
        """Yields functions that each fill a part of `out`."""
        recipe = self._recipes[name]
        ordered = len(recipe.shape) == 1 and recipe.parts[0].order is not None
        if recipe.build is not None or ordered or self._slices.get(name):
            yield lambda: _copy(out, self.tensor(name))
            return
        rows = recipe.parts[0]
        columns = rows.shape[-1]
        target, step = out.view(rows.number, columns), max(1, CHUNK // columns)
        for first in range(0, rows.number, step):
            count = min(step, rows.number - first)

            def fill(first: int = first, count: int = count) -> None:
                values = dequantize(self._blocks(rows, first, count), rows.stored.type)
                if rows.order is None:
                    target[first : first + count].copy_(values)
                else:
                    target[rows.order[first : first + count]] = values.to(out.dtype)

            yield fill

    def _whole(self, rows: Rows) -> Tensor:
        """Returns rows as one tensor."""
        values = dequantize(self._blocks(rows, 0, rows.number), rows.stored.type).view(rows.shape)
        if rows.order is None:
            return values
        ordered = torch.empty_like(values)
        ordered[rows.order] = values
        return ordered

    def _blocks(self, rows: Rows, first: int, count: int) -> Blocks:
        """Returns some of `rows`, packed as in the file.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        tensor = rows.stored
        if rows.columns is None:
            blocks = np.empty((count, tensor.row_bytes), np.uint8)
            self._fill(blocks, rows, first)
            return blocks
        block, size = tensor.type.block, tensor.type.size
        begin, end = rows.columns.start // block * size, rows.columns.stop // block * size
        blocks, step = np.empty((count, end - begin), np.uint8), max(1, CHUNK // tensor.row_bytes)
        for at in range(0, count, step):
            whole = np.empty((min(step, count - at), tensor.row_bytes), np.uint8)
            self._fill(whole, rows, first + at)
            blocks[at : at + len(whole)] = whole[:, begin:end]
        return blocks

    def _fill(self, blocks: Blocks, rows: Rows, first: int) -> None:
        """Reads as many of `rows` as `blocks` has, whole ones."""
        done = 0
        for run in rows.runs or (range(rows.number),):
            skipped = min(len(run), first)
            first -= skipped
            count = min(len(run) - skipped, len(blocks) - done)
            self._read(blocks[done : done + count], rows.stored, rows.first + run.start + skipped)
            done += count

    def _read(self, blocks: Blocks, tensor: StoredTensor, first: int) -> None:
        unread, offset = blocks.reshape(-1).data, tensor.offset + first * tensor.row_bytes
        try:
            while unread:
                if not (count_read := os.preadv(self._files[tensor.file], [unread], offset)):
                    raise ConfigurationError(f"{tensor.file} has become shorter: fetch the model again")
                unread, offset = unread[count_read:], offset + count_read
        except OSError as error:
            raise ConfigurationError(f"cannot read {tensor.file}: {error.strerror}") from error


def _contradiction(name: str, error: RuntimeError) -> ConfigurationError:
    reason = str(error).splitlines()[0]
    return ConfigurationError(f"tensor {name} cannot be made from those of the file ({reason}): fetch the model again")


def _copy(out: Tensor, values: Tensor) -> None:
    out.copy_(values.view(out.shape) if values.is_contiguous() else values.reshape(out.shape))


def dequantize(blocks: Blocks, kind: TensorType) -> Tensor:
    """Returns packed rows [rows, bytes] as numbers [rows, columns], in float32 or the file's own unquantized dtype.

    The result may share the memory of `blocks`.
    """
    if kind.name in PLAIN:
        return torch.from_numpy(blocks).view(PLAIN[kind.name])
    package: Any = getattr(quants, kind.name)
    package.init_grid()
    return torch.from_numpy(package.dequantize_blocks(blocks.reshape(-1, kind.size)).reshape(len(blocks), -1))
