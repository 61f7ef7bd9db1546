"""Fills a model with the tensors of a checkpoint, by name."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pagewire.services.executor.models.layers import PackedLinear
from pagewire.services.executor.models.model import CausalLM
from pagewire.shared.errors import ConfigurationError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
STORED_DTYPES = ("F32", "BF16", "F16")
DERIVED = ".rotary_emb.inv_freq"
"""Ending of tensors that old checkpoints hold although the configuration determines them."""


class Place(NamedTuple):
    """Where a tensor of the checkpoint goes: rows [first, first + shape[0]) of a parameter."""

    parameter: str
    first: int
    shape: tuple[int, ...]


def load_weights(model: CausalLM, folder: Path, dtype: torch.dtype) -> None:
    """Gives `model`, built on the meta device, parameters of `dtype` in CPU memory.

    Each parameter is allocated once and filled from the mapped file, so the checkpoint is never in memory twice.

    Raises:
        ConfigurationError: files are missing or broken, or a tensor is missing, unexpected, or of another shape.
    """
    with ExitStack() as stack:
        stored = {name: file for file in _open(folder, stack) for name in file.keys()}  # noqa: SIM118
        places = dict(_places(model))
        tied = model.lm_head is None and HEAD in stored
        unknown = {name for name in stored if name not in places and not name.endswith(DERIVED)}
        _refuse("misses", places.keys() - stored.keys())
        _refuse("has unexpected", unknown - ({HEAD} if tied else set()))
        _check(stored, places)
        state = {name: torch.empty(value.shape, dtype=dtype) for name, value in model.named_parameters()}
        for name, place in places.items():
            rows = state[place.parameter].narrow(0, place.first, place.shape[0])
            rows.copy_(stored[name].get_tensor(name))
        model.load_state_dict(state, assign=True)
        model.requires_grad_(requires_grad=False)
        if tied and not torch.equal(stored[HEAD].get_tensor(HEAD).to(dtype), model.embedding):
            raise ConfigurationError(f"{HEAD} differs from the embedding although config.json ties the two")


def _places(model: CausalLM) -> Iterator[tuple[str, Place]]:
    """Every tensor that the checkpoint must hold, with where it goes."""
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


def _open(folder: Path, stack: ExitStack) -> list[Any]:
    """The checkpoint's files, mapped; the stack closes them."""
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
        raise ConfigurationError(f"{index} names files outside of the folder: fetch the model again")
    return [folder / name for name in sorted(names)]


def _check(stored: dict[str, Any], places: dict[str, Place]) -> None:
    for name, place in places.items():
        view = stored[name].get_slice(name)
        if tuple(view.get_shape()) != place.shape:
            raise ConfigurationError(
                f"tensor {name} has shape {list(view.get_shape())}, config.json asks for {list(place.shape)}"
            )
        if view.get_dtype() not in STORED_DTYPES:
            raise ConfigurationError(
                f"tensor {name} has dtype {view.get_dtype()}, only {', '.join(STORED_DTYPES)} load"
            )


def _refuse(what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ConfigurationError(
            f"the checkpoint {what} tensors: {shown}. Do its config.json and weights belong together?"
        )
