"""Finds the tensors of a GGUF file that a tensor of a Hugging Face checkpoint consists of.

Names come from the package `gguf`, which knows those of every family in Hugging Face's checkpoints. llama.cpp's
converter also changes some tensors: `changes.py` has how to undo that.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor

from pagewire.services.executor.models.gguf.changes import CHANGES, CONSTANTS, JOINED, NAMES, QKV
from pagewire.services.executor.models.shard import Ranges, Slices, cut_shape, true_runs
from pagewire.shared.models.gguf.architectures import ARCHITECTURES
from pagewire.shared.models.gguf.reader import GgufModel, StoredTensor
from pagewire.shared.models.gguf.rope import LONG, ROPE_FACTORS, SHORT


class Rows(NamedTuple):
    """Consecutive rows of a stored tensor."""

    stored: StoredTensor
    first: int
    number: int
    shape: tuple[int, ...]
    """Shape of the rows as a tensor."""
    order: Tensor | None = None
    """Row of the tensor for each stored row [number]; None: the order is the same."""
    runs: Ranges | None = None
    """The rows that are read, counted from `first`; None: all. `number` and `order` are those of these rows alone."""
    columns: range | None = None
    """The numbers of each row that are read; None: all."""

    @classmethod
    def of(cls, stored: StoredTensor) -> "Rows":
        """Returns all rows."""
        return cls(stored, 0, stored.rows, stored.shape)

    def cut(self, slices: Slices) -> "Rows":
        """Returns the rows and columns of a matrix, or the numbers of a vector, that have these indices."""
        shape, cut = cut_shape(self.shape, slices), self
        if len(shape) > 1 and 0 in slices:
            kept = torch.zeros(self.number, dtype=torch.bool)
            for part in slices[0]:
                kept[part.start : part.stop] = True
            stored = kept if self.order is None else kept[self.order]
            order = None if self.order is None else (kept.cumsum(0) - 1)[self.order[stored]]
            cut = cut._replace(runs=true_runs(stored), number=shape[0], order=order)
        if len(shape) > 1 and 1 in slices:
            (columns,) = slices[1]
            cut = cut._replace(columns=columns)
        return cut._replace(shape=shape)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tensor of a checkpoint, made from stored ones."""

    parts: tuple[Rows, ...]
    """Empty, where the metadata has the tensor."""
    build: Callable[[tuple[Tensor, ...]], Tensor] | None = None
    """Takes a tensor per part and returns the whole; None: the only part is it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        if self.build is None:
            return self.parts[0].shape
        return tuple(self.build(tuple(torch.empty(part.shape, device="meta") for part in self.parts)).shape)


def find_recipes(model: GgufModel, config: Mapping[str, Any], names: Collection[str]) -> dict[str, Recipe]:
    """Returns the recipe of each tensor of a checkpoint that a GGUF file has.

    Stored tensors that the checkpoint has no use for are there by their own names.

    Args:
        model: the file.
        config: its config.json.
        names: the checkpoint's tensors.
    """
    finder = _Finder(model, config)
    recipes = {name: recipe for name in names if (recipe := finder.find(name)) is not None}
    used = {part.stored.name for recipe in recipes.values() for part in recipe.parts}
    unused = (tensor for name, tensor in model.tensors.items() if name not in used)
    return recipes | {tensor.name: Recipe((Rows.of(tensor),)) for tensor in unused if not finder.is_idle(tensor.name)}


class _Finder:
    """The names of one file."""

    def __init__(self, model: GgufModel, config: Mapping[str, Any]) -> None:
        architecture = str(model.metadata["general.architecture"])
        number = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
        self._layers = int(config["num_hidden_layers"])
        self._map = get_tensor_name_map(MODEL_ARCH(number), self._layers)
        self._tensors, self._config = model.tensors, config
        self._interleaved = ARCHITECTURES[architecture].interleaved
        self._changes, self._names = CHANGES.get(architecture, {}), NAMES.get(architecture, {})
        self._metadata, self._constants = model.metadata, CONSTANTS.get(architecture, {})
        # Rows of queries and keys in one matrix with values cannot be brought into another order.
        joins = JOINED.get(architecture, JOINED[None])
        self._joins = [join for join in joins if not (self._interleaved and QKV in join[1])]

    def find(self, name: str) -> Recipe | None:
        """Returns the recipe of a tensor of the checkpoint; None if the file does not have it."""
        whole, index = _without_index(name)
        recipe = self._joined(name) or self._constant(name)
        if recipe is not None:
            return recipe
        stored = self._stored(whole)
        return None if stored is None else self._recipe(stored, index)

    def is_idle(self, name: str) -> bool:
        """Returns whether a stored tensor changes no logits.

        config.json has it, or it predicts further tokens, or its layer takes keys and values from another one.
        """
        if name in (ROPE_FACTORS, LONG, SHORT) or ".attn_rot_embd." in name:
            return True
        block = re.match(r"blk\.(\d+)\.(attn_[kv](_norm)?\.)?", name)
        if block is None:
            return False
        own = self._layers - int(self._config.get("num_kv_shared_layers", 0))
        return int(block[1]) >= (own if block[2] else self._layers)

    def _stored(self, name: str) -> StoredTensor | None:
        for pattern, replacement in self._names.items():
            name = re.sub(pattern, replacement, name)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        known = self._map.get_name(name, try_suffixes=(".weight", ".bias")) or name
        places = (known, f"{known}.weight", f"{known}.bias")
        return next((self._tensors[place] for place in places if place in self._tensors), None)

    def _recipe(self, stored: StoredTensor, index: int | None) -> Recipe:
        rows = Rows.of(stored)
        if index is not None and len(stored.shape) > 1:
            number = rows.number // stored.shape[0]
            rows = Rows(stored, index * number, number, stored.shape[1:])
        if self._interleaved and re.search(r"\.attn_[qk]\.(weight|bias)$", stored.name):
            rows = rows._replace(order=rotary_pairs(stored.shape[0], int(self._config["head_dim"])))
        change = next((change for part, change in self._changes.items() if re.search(part, stored.name)), None)
        return Recipe((rows,), None if change is None else partial(change, config=self._config))

    def _joined(self, name: str) -> Recipe | None:
        layer, kind = re.search(r"\.(\d+)\.", name), "bias" if name.endswith("bias") else "weight"
        if layer is None:
            return None
        for end, sources, build in self._joins:
            places = [f"blk.{layer[1]}.{source}.{kind}" for source in sources]
            if re.search(end, name) and all(place in self._tensors for place in places):
                parts = tuple(Rows.of(self._tensors[place]) for place in places)
                return Recipe(parts, partial(build, config=self._config))
        return None

    def _constant(self, name: str) -> Recipe | None:
        """Returns the recipe of a number that the file has in its metadata, one per layer."""
        layer = re.search(r"\.(\d+)\.", name)
        for pattern, (replacement, shape) in self._constants.items():
            match = re.search(pattern, name)
            values = self._metadata.get(match.expand(replacement)) if match else None
            if layer is not None and values is not None:
                number = torch.tensor(float(values[int(layer[1])] if np.ndim(values) else values))
                return Recipe((), partial(_given, number=number.view(shape)))
        return None


def _given(parts: tuple[Tensor, ...], number: Tensor) -> Tensor:
    del parts
    return number


def _without_index(name: str) -> tuple[str, int | None]:
    """Returns a name without the index of one of several matrices or norms that a file has as one, and that index."""
    match = re.search(r"(\.experts|\.norms|\.altup_\w*projections)\.(\d+)(?=\.)", name)
    if match is None:
        return name, None
    kept = "" if match[1] == ".norms" else match[1]
    return name[: match.start()] + kept + name[match.end() :], int(match[2])


def rotary_pairs(rows: int, head: int) -> Tensor:
    """Returns the row of the tensor for each row in ggml's order of rotary pairs."""
    return torch.arange(rows).view(-1, 2, head // 2).transpose(1, 2).flatten()
