"""Loads the tensors of a checkpoint into a model, by name."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import nn

from pagewire.services.executor.models.feed_forward import Experts
from pagewire.services.executor.models.layers import PackedLinear, Stored
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.shard import Ranges, Slices, Units, take, true_runs
from pagewire.services.executor.models.tensors import TensorSource
from pagewire.shared.errors import ConfigurationError

HEAD = "lm_head.weight"
DERIVED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Suffixes of tensors in old checkpoints that the configuration determines."""
DRAWN = 4_000_037
"""Random numbers that random weights repeat; a prime, so that hardly two rows of a matrix begin with the same one."""


Parts = Mapping[str, Stored]
"""The checkpoint's tensors that a parameter consists of, in order, by name."""


class Place(NamedTuple):
    """The parameter that a tensor of the checkpoint is a part of."""

    parameter: str
    stored: Stored


class Packing(Protocol):
    """Keeps the weights of matrix products as a device's kernels read them."""

    @property
    def units(self) -> Units:
        """The units in which weights may be cut for several ranks before they are packed."""

    def pack(self, model: CausalLM, source: TensorSource, parts: Mapping[str, Parts], dtype: torch.dtype) -> None:
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
    places, tied = check_tensors(model, source)
    if tied:
        _check_head(source, places, model, dtype)
    if packing is not None:
        packing.pack(model, source, _parts(places), dtype)
    state = {name: torch.empty(value.shape, dtype=dtype) for name, value in model.named_parameters()}
    source.read(
        {name: place.stored.part(state[place.parameter]) for name, place in places.items() if place.parameter in state}
    )
    model.load_state_dict(state, assign=True)
    model.requires_grad_(requires_grad=False)


def check_tensors(model: CausalLM, source: TensorSource) -> tuple[dict[str, Place], bool]:
    """Returns the places of a checkpoint's tensors in a model, and whether an output matrix is stored beside the
    embedding that the model has for it.

    Raises:
        ConfigurationError: a tensor is missing, unexpected, or of another shape.
    """
    places, stored = dict(places_of(model)), set(source.names())
    tied = model.lm_head is None and HEAD in stored
    unknown = {name for name in stored - places.keys() if not _is_idle(source, name)}
    _refuse("misses", places.keys() - stored)
    _refuse("has unexpected", unknown - ({HEAD} if tied else set()))
    _check(source, places)
    return places, tied


def _is_idle(source: TensorSource, name: str) -> bool:
    """Returns whether a tensor that the model lacks would change nothing.

    Tools for GPTQ write a bias of zeros for every product.
    """
    if name.endswith(DERIVED):
        return True
    if not name.endswith(".bias"):
        return False
    bias = torch.empty(source.shape(name))
    source.read({name: bias})
    return not bias.any()


def read_part(source: TensorSource, name: str, stored: Stored, whole: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows of a parameter, of shape `whole`, that a checkpoint's tensor `name` has.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    rows = torch.empty(stored.shape if stored.in_rows else whole, dtype=dtype)
    source.read({name: rows if stored.in_rows else stored.part(rows)})
    return rows


def random_weights(
    model: nn.Module,
    dtype: torch.dtype,
    seed: int,
    held: Callable[[str], Slices] = lambda _name: {},
) -> dict[str, torch.Tensor]:
    """Returns random parameters: matrices are normally distributed, vectors near 1, so that texts vary.

    Of each parameter only the indices are kept that `held` returns for its name.

    PyTorch draws on one core: 8 billion numbers would take two minutes. So all matrices repeat `DRAWN` numbers.
    """
    random = torch.Generator().manual_seed(seed)
    drawn = torch.empty(DRAWN).normal_(generator=random)
    state, place = {}, 0
    for name, parameter in model.named_parameters():
        weight = torch.empty(parameter.shape, dtype=dtype)
        if parameter.dim() < 2:
            weight.normal_(1.0, 0.02, generator=random)
        else:
            scaled = (drawn * parameter.shape[-1] ** -0.5).to(dtype)
            place = _repeat(scaled, place, weight.view(-1))
        part = take(weight, held(name))
        state[name] = part if len(part) == len(weight) and part.is_contiguous() else part.clone()
    return state


def _repeat(numbers: torch.Tensor, place: int, out: torch.Tensor) -> int:
    """Fills `out` [N] with `numbers` from `place` on, over and over; returns the place behind the last one written."""
    for first in range(-place, len(out), len(numbers)):
        begin, end = max(first, 0), min(first + len(numbers), len(out))
        out[begin:end] = numbers[begin - first : end - first]
    return (place + len(out)) % len(numbers)


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


def stored_slices(whole: CausalLM, held: Callable[[str], Slices]) -> dict[str, Slices]:
    """Returns the indices of each of the checkpoint's tensors that a rank needs.

    Args:
        whole: the model of all ranks.
        held: returns the indices of a parameter that the rank has.
    """
    parameters = dict(whole.named_parameters())
    return {
        name: dict(
            pair
            for dim, ranges in held(path).items()
            if (pair := _stored_dim(stored, parameters[path].shape, dim, ranges)) is not None
        )
        for name, (path, stored) in places_of(whole)
    }


def inputs_dim(stored: Stored, shape: torch.Size) -> int:
    """Returns the dimension of a stored tensor that is the inputs of a matrix of `shape` [N, K]."""
    if stored.in_rows:
        return 1
    place = _stored_dim(stored, shape, 1, (range(shape[1]),))
    return 1 if place is None else place[0]


def _stored_dim(stored: Stored, shape: torch.Size, dim: int, ranges: Ranges) -> tuple[int, Ranges] | None:
    """Returns a dimension of a stored tensor, and its indices that fill `ranges` of a parameter's dimension `dim`.

    None: the tensor has one index of the dimension, as an expert's matrix has.
    """
    numbers = torch.arange(shape[dim])
    filled = stored.part(numbers.view([-1 if at == dim else 1 for at in range(len(shape))]).expand(shape))
    strides = [bool(stride) for stride in filled.stride()]
    if True not in strides:
        return None
    first, last = strides.index(True), len(strides) - strides[::-1].index(True)
    places = filled[(0,) * first + (...,) + (0,) * (len(strides) - last)].flatten()
    kept = torch.zeros(shape[dim], dtype=torch.bool)
    for part in ranges:
        kept[part.start : part.stop] = True
    before, outer = math.prod(filled.shape[:first]), 0
    while math.prod(stored.shape[:outer]) < before:
        outer += 1
    return outer, true_runs(kept[places])


def _whole(module: nn.Module) -> Iterator[Stored]:
    for kind, parameter in module.named_parameters(recurse=False):
        yield Stored(kind, kind, tuple(parameter.shape), lambda whole: whole)


def _check(source: TensorSource, places: dict[str, Place]) -> None:
    for name, (_, stored) in places.items():
        if (shape := source.shape(name)) != stored.shape:
            raise ConfigurationError(f"tensor {name} has shape {list(shape)}, config.json needs {list(stored.shape)}")


def _parts(places: Mapping[str, Place]) -> Mapping[str, Parts]:
    """Returns the tensors that each parameter consists of."""
    parts: dict[str, dict[str, Stored]] = {}
    for name, place in places.items():
        parts.setdefault(place.parameter, {})[name] = place.stored
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
