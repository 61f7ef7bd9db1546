"""Loads the tensors of a checkpoint into a model, by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pagewire.services.executor.models.layers import PackedLinear
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.tensors import TensorSource, open_tensors
from pagewire.shared.errors import ConfigurationError

HEAD = "lm_head.weight"
DERIVED = ".rotary_emb.inv_freq"
"""Suffix of tensors in old checkpoints that the configuration determines."""


class Place(NamedTuple):
    """The target of a checkpoint's tensor: rows [first, first + shape[0]) of a parameter."""

    parameter: str
    first: int
    shape: tuple[int, ...]


def load_weights(model: CausalLM, path: Path, dtype: torch.dtype, quantization: dict[str, Any] | None = None) -> None:
    """Loads parameters of `dtype` from a folder or a GGUF file into `model`, which was built on the meta device.

    `quantization` is the `quantization_config` of the folder.

    Each parameter is allocated in CPU memory once and filled from the file, so the checkpoint is never in memory twice.

    Raises:
        ConfigurationError: files are missing or broken, or a tensor is missing, unexpected, or of another shape.
    """
    with open_tensors(path, quantization) as source:
        places, stored = dict(_places(model)), set(source.names())
        tied = model.lm_head is None and HEAD in stored
        unknown = {name for name in stored - places.keys() if not _is_idle(source, name)}
        _refuse("misses", places.keys() - stored)
        _refuse("has unexpected", unknown - ({HEAD} if tied else set()))
        _check(source, places)
        state = {name: torch.empty(value.shape, dtype=dtype) for name, value in model.named_parameters()}
        source.read(
            {name: state[place.parameter].narrow(0, place.first, place.shape[0]) for name, place in places.items()}
        )
        model.load_state_dict(state, assign=True)
        model.requires_grad_(requires_grad=False)
        if tied:
            _check_head(source, model.embedding)


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


def _check_head(source: TensorSource, embedding: torch.Tensor) -> None:
    """Checks that a stored output matrix equals the embedding, which is used instead."""
    if source.shape(HEAD) == tuple(embedding.shape):
        head = torch.empty_like(embedding)
        source.read({HEAD: head})
        if torch.equal(head, embedding):
            return
    raise ConfigurationError(f"{HEAD} differs from the embedding although config.json ties the two")


def _refuse(what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ConfigurationError(
            f"the checkpoint {what} tensors: {shown}. Do its config.json and weights belong together?"
        )
