"""A part of a checkpoint's tensors, cut so that it is itself a checkpoint in the same format."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from pagewire.services.executor.models.quantized.weight import Content, Header, Layout, QuantizedWeight, StoredTensors
from pagewire.services.executor.models.shard import Slices, cut_shape, take
from pagewire.shared.errors import ConfigurationError


class CutFiles(StoredTensors):
    """Some tensors of other files, of each the indices that are needed. Tensors of the files are read lazily."""

    def __init__(
        self, files: StoredTensors, weights: Mapping[str, QuantizedWeight], slices: Mapping[str, Slices]
    ) -> None:
        """`slices` has the tensors that are there, by their names in the unquantized checkpoint.

        Raises:
            ConfigurationError: a slice cuts numbers that are stored together.
        """
        self._files = files
        self._slices: dict[str, Slices] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, slices_of_name in slices.items():
            weight = weights.get(name)
            if weight is None:
                self._slices[name] = slices_of_name
                continue
            for part, layout in weight.parts.items():
                if layout is Content.SHAPE:
                    self._slices[part], self._shapes[part] = {}, cut_shape(weight.shape, slices_of_name)
                elif layout is not Content.ORDER:
                    self._slices[part] = _stored_slices(part, layout, weight.shape, slices_of_name)

    @override
    def names(self) -> Collection[str]:
        return self._slices.keys()

    @override
    def header(self, name: str) -> Header:
        header = self._files.header(name)
        return Header(header.dtype, cut_shape(header.shape, self._slices[name]))

    @override
    def tensor(self, name: str) -> Tensor:
        stored = self._files.tensor(name)
        if name in self._shapes:
            return torch.tensor(self._shapes[name], dtype=stored.dtype)
        return take(stored, self._slices[name])


def _stored_slices(name: str, layout: Layout, shape: tuple[int, ...], slices: Slices) -> Slices:
    """Returns the indices of a stored tensor that the slices of its weight of `shape` need."""
    stored: dict[int, tuple[range, ...]] = {}
    assert not isinstance(layout, Content)
    for at, axis in enumerate(layout):
        if axis is None or axis.dim not in slices:
            continue
        parts = [axis.stored_range(part, shape[axis.dim]) for part in slices[axis.dim]]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            raise ConfigurationError(
                f"tensor {name} has {axis.unit} numbers together, between which it cannot be cut: set another "
                "tensor-parallel-size"
            )
        stored[at] = tuple(whole)
    return stored
