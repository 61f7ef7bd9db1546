"""Loads the tensors of a checkpoint into a model, by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from pagewire.services.executor.models.feed_forward import Experts
from pagewire.services.executor.models.layers import PackedLinear, Stored
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.tensors import TensorSource, open_tensors
from pagewire.shared.errors import ConfigurationError

HEAD = "lm_head.weight"
DERIVED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Suffixes of tensors in old checkpoints that the configuration determines."""


class Place(NamedTuple):
    """Where a tensor of the checkpoint belongs."""

    parameter: str
    stored: Stored


def load_weights(model: CausalLM, path: Path, dtype: torch.dtype) -> None:
    """Loads parameters of `dtype` from a folder or a GGUF file into `model`, which was built on the meta device.

    Each parameter is allocated in CPU memory once and filled from the file, so the checkpoint is never in memory twice.

    Raises:
        ConfigurationError: files are missing or broken, or a tensor is missing, unexpected, or of another shape.
    """
    with open_tensors(path) as source:
        places, stored = dict(places_of(model)), set(source.names())
        tied = model.lm_head is None and HEAD in stored
        unknown = {name for name in stored - places.keys() if not name.endswith(DERIVED)}
        _refuse("misses", places.keys() - stored)
        _refuse("has unexpected", unknown - ({HEAD} if tied else set()))
        _check(source, places)
        state = {name: torch.empty(value.shape, dtype=dtype) for name, value in model.named_parameters()}
        targets = {name: place.stored.part(state[place.parameter]) for name, place in places.items()}
        total = sum(target.nbytes for target in targets.values())
        with tqdm(desc="loading", total=total, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            source.read(targets, bar.update)
        model.load_state_dict(state, assign=True)
        model.requires_grad_(requires_grad=False)
        if tied:
            _check_head(source, model.embedding)


def random_weights(model: nn.Module, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Returns random parameters: matrices are normally distributed, vectors near 1, so that texts vary."""
    random = torch.Generator().manual_seed(seed)
    state = {}
    for name, parameter in model.named_parameters():
        made = torch.empty(parameter.shape, dtype=dtype)
        if parameter.dim() < 2:
            state[name] = made.normal_(1.0, 0.02, generator=random)
        else:
            state[name] = made.normal_(0.0, parameter.shape[-1] ** -0.5, generator=random)
    return state


def places_of(model: CausalLM) -> Iterator[tuple[str, Place]]:
    """Yields the name and the place of every tensor that the checkpoint must have."""
    for path, module in model.named_modules():
        match module:
            case PackedLinear():
                above, parts = path.rpartition(".")[0], module.stored()
            case Experts():
                above, parts = path, module.stored()
            case _:
                above, parts = path, _whole(module)
        for stored in parts:
            yield model.stored_name(f"{above}.{stored.name}"), Place(f"{path}.{stored.parameter}", stored)


def _whole(module: nn.Module) -> Iterator[Stored]:
    for kind, parameter in module.named_parameters(recurse=False):
        yield Stored(kind, kind, tuple(parameter.shape), lambda whole: whole)


def _check(source: TensorSource, places: dict[str, Place]) -> None:
    for name, (_, stored) in places.items():
        if (shape := source.shape(name)) != stored.shape:
            raise ConfigurationError(f"tensor {name} has shape {list(shape)}, config.json needs {list(stored.shape)}")


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
