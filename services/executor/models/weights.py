"""Loads the tensors of a checkpoint into a model, by name."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from pagewire.services.executor.models.layers import PackedLinear
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.tensors import TensorSource
from pagewire.shared.errors import ConfigurationError

HEAD = "lm_head.weight"
DERIVED = ".rotary_emb.inv_freq"
"""Suffix of tensors in old checkpoints that the configuration determines."""


Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each of the checkpoint's tensors that a parameter consists of, in order."""


class Place(NamedTuple):
    """The target of a checkpoint's tensor: rows [first, first + shape[0]) of a parameter."""

    parameter: str
    first: int
    shape: tuple[int, ...]


class Packing(Protocol):
    """Keeps the weights of matrix products as a device's kernels read them."""

    def pack(self, model: CausalLM, source: TensorSource, parts: Mapping[str, Shapes], dtype: torch.dtype) -> None:
        """Replaces modules of `model`, which was built on the meta device, by others that have their weights.

        Args:
            model: the model.
            source: the checkpoint.
            parts: what each parameter consists of.
            dtype: of tensors that are not quantized.

        Raises:
            ConfigurationError: a file cannot be read.
        """


def load_weights(model: CausalLM, source: TensorSource, dtype: torch.dtype, packing: Packing | None = None) -> None:
    """Loads parameters of `dtype` into `model`, which was built on the meta device.

    Each parameter is allocated in CPU memory once and filled from the file, so the checkpoint is never in memory twice.
    What `packing` replaces has no parameters.

    Raises:
        ConfigurationError: a tensor is missing, unexpected, or of another shape, or a file cannot be read.
    """
    places, stored = dict(_places(model)), set(source.names())
    tied = model.lm_head is None and HEAD in stored
    unknown = {name for name in stored - places.keys() if not _is_idle(source, name)}
    _refuse("misses", places.keys() - stored)
    _refuse("has unexpected", unknown - ({HEAD} if tied else set()))
    _check(source, places)
    if tied:
        _check_head(source, places, model, dtype)
    if packing is not None:
        packing.pack(model, source, _parts(places), dtype)
    state = {name: torch.empty(value.shape, dtype=dtype) for name, value in model.named_parameters()}
    source.read(
        {
            name: state[place.parameter].narrow(0, place.first, place.shape[0])
            for name, place in places.items()
            if place.parameter in state
        }
    )
    model.load_state_dict(state, assign=True)
    model.requires_grad_(requires_grad=False)


def _is_idle(source: TensorSource, name: str) -> bool:
    """Returns whether a tensor that the model lacks would change nothing.

    Tools for GPTQ write a bias of zeros for every product.
    """
    if name.endswith(".bias"):
        bias = torch.empty(source.shape(name))
        source.read({name: bias})
        return not bias.any()
    return name.endswith(DERIVED)


def _places(model: CausalLM) -> Iterator[tuple[str, Place]]:
    """Yields the name and the place of every tensor that the checkpoint must have."""
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{kind}"
            if not isinstance(module, PackedLinear):
                yield name, Place(name, 0, tuple(parameter.shape))
                continue
            first = 0
            for part, rows in module.parts.items():
                part_name = f"{path.rpartition('.')[0]}.{part}.{kind}"
                yield part_name, Place(name, first, (rows, *parameter.shape[1:]))
                first += rows


def _check(source: TensorSource, places: dict[str, Place]) -> None:
    for name, place in places.items():
        if (shape := source.shape(name)) != place.shape:
            raise ConfigurationError(f"tensor {name} has shape {list(shape)}, config.json needs {list(place.shape)}")


def _parts(places: Mapping[str, Place]) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
    """Returns the names and shapes of the tensors that each parameter consists of, in order."""
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, place in places.items():
        parts.setdefault(place.parameter, {})[name] = place.shape
    return parts


def _check_head(source: TensorSource, places: Mapping[str, Place], model: CausalLM, dtype: torch.dtype) -> None:
    """Checks that a stored output matrix equals the embedding, which is used instead."""
    embedding = model.embedding
    (parameter,) = (name for name, value in model.named_parameters() if value is embedding)
    (stored,) = (name for name, place in places.items() if place.parameter == parameter)
    if source.shape(HEAD) == tuple(embedding.shape):
        both = {name: torch.empty(embedding.shape, dtype=dtype) for name in (HEAD, stored)}
        source.read(both)
        if torch.equal(both[HEAD], both[stored]):
            return
    raise ConfigurationError(f"{HEAD} differs from the embedding although config.json ties the two")


def _refuse(what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ConfigurationError(
            f"the checkpoint {what} tensors: {shown}. Do its config.json and weights belong together?"
        )
