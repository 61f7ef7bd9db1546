"""The adapters of a GPU's slots: their factors in places on the device, and the tokens of a step that each updates.

What the graphs read stays where it is. Before a step the host sends the tokens of each adapter, and an adapter that has
no place yet, all in the order of the steps: no step waits, and none reads what is being overwritten.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from pagewire.kernels.triton.layers.low_rank import (
    FIELDS,
    PARTS,
    ROWS,
    Tiles,
    Updates,
    add_updates,
    most_tiles,
    pack,
    padded,
    size_of,
)
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.targets import Targets
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.cuda.staging import Int32
from pagewire.services.executor.devices.protocol import AdapterSlots, Int64, LoadedAdapter, StepBatch
from pagewire.services.executor.models.model import CausalLM, ModelCut
from pagewire.services.executor.models.shard import cut_shape
from pagewire.shared.errors import ConfigurationError


class Product(NamedTuple):
    """A product of the model that adapters can update."""

    number: int
    """Number in the tables of the device."""
    inputs: int
    outputs: int
    parts: int
    """Matrices of the checkpoint that it consists of."""


class CudaAdapters(AdapterSlots):
    """Adapters on the device. A token's result depends on no other token.

    Attributes:
        updates: the factors of the adapters that have a place.
        tiles: the tokens that each of them updates in the next step.
    """

    def __init__(
        self,
        runtime: Runtime,
        targets: Targets,
        dtype: torch.dtype,
        places: int,
        max_rank: int,
        max_tokens: int,
        part: ModelCut | None = None,
    ) -> None:
        """Takes the memory of `places` adapters of `max_rank` ranks, the most that run in one step.

        `dtype` is the model's. Captured steps have up to `max_tokens` tokens. `part` is that of a rank, whose adapters
        are cut like it; None: the model is whole.
        """
        self.targets = targets
        self.products = products_of(targets, part)
        self.most_ranks = padded(max_rank)
        self._runtime, self._dtype = runtime, dtype
        self._slots: dict[int, LoadedAdapter] = {}
        self._places: OrderedDict[int, Updates | None] = OrderedDict.fromkeys(range(places))  # the last used one last
        sizes = ((product.parts * product.inputs + product.outputs) for product in self.products.values())
        shape, device = (places, len(self.products)), runtime.device
        self.updates = Updates(
            torch.zeros(places, self.most_ranks * sum(sizes), dtype=dtype, device=device),
            torch.zeros(*shape, FIELDS, dtype=torch.int32, device=device),
            torch.zeros(*shape, PARTS, device=device),
        )
        self._max_tokens = max_tokens
        self._captured = self._room(max_tokens)
        self._captured[0].fill_(-1)
        self._empty = True
        """Whether the graphs read that no token has an adapter."""
        _, self.tiles = self._captured

    def attach(self, model: CausalLM) -> None:
        """Has the products of `model`, which is on the device, updated."""
        for path, product in self.products.items():
            parent, _, name = path.rpartition(".")
            module = model.get_submodule(parent)
            setattr(module, name, AdaptedLinear(getattr(module, name), self, product))

    @override
    def pack(self, adapter: Adapter) -> Updates:
        updates = {self.products[path].number: several for path, several in adapter.updates.items()}
        words = -(-size_of(updates) * self._dtype.itemsize // 4)
        packed = Updates(
            self._runtime.pinned(words).view(self._dtype),
            self._runtime.pinned(len(self.products), FIELDS),
            self._runtime.pinned(len(self.products), PARTS).view(torch.float32),
        )
        pack(updates, packed)
        return packed

    @override
    def assign(self, slot: int, adapter: LoadedAdapter) -> None:
        self._slots[slot] = adapter

    @override
    def clear(self, slot: int) -> None:
        del self._slots[slot]

    def begin(self, batch: StepBatch, tokens: int) -> None:
        """Enqueues what the next step needs, a step of `tokens` tokens with padding.

        Raises:
            ConfigurationError: the step has more adapters than there are places.
        """
        adapters: dict[int, Updates] = {}
        for row, slot in enumerate(batch.slots.tolist()) if self._slots else ():
            if (adapter := self._slots.get(slot)) is not None:
                adapters[row] = adapter.packed
        captured = tokens <= self._max_tokens
        memory, self.tiles = self._captured if captured else self._room(tokens)
        if captured:
            if self._empty and not adapters:
                return
            self._empty = not adapters
        places = self._place({id(packed): packed for packed in adapters.values()})
        rows: Int64 = np.full(len(batch.slots), -1)
        for row, packed in adapters.items():
            rows[row] = places[id(packed)]
        tiles, order = gather(np.repeat(rows, batch.query_lens), len(self.tiles.tiles))
        columns = np.concatenate((tiles.ravel(), order))
        pinned = self._runtime.pinned(len(columns))
        pinned.numpy()[:] = columns
        memory[: len(columns)].copy_(pinned, non_blocking=True)

    def _room(self, tokens: int) -> tuple[Tensor, Tiles]:
        """Returns memory for the columns of a step of up to `tokens` tokens, as a whole and by column."""
        ends = -(-3 * most_tiles(tokens, len(self._places)) // 12) * 12  # addresses are multiples of 16 bytes
        columns = torch.empty(ends + tokens, dtype=torch.int32, device=self._runtime.device)
        return columns, Tiles(columns[:ends].view(-1, 3), columns[ends:])

    def _place(self, adapters: Mapping[int, Updates]) -> dict[int, int]:
        """Returns the place of each adapter, and sends those that have none."""
        if len(adapters) > len(self._places):
            raise ConfigurationError(
                f"a step has {len(adapters)} adapters, and there is room for {len(self._places)}: "
                "give max-loras of the scheduler to the executor too"
            )
        places = {id(packed): place for place, packed in self._places.items() if id(packed) in adapters}
        for place in places.values():
            self._places.move_to_end(place)
        for key, packed in adapters.items():
            if key not in places:
                place = places[key] = next(iter(self._places))
                self._places[place] = packed
                self._places.move_to_end(place)
                self.updates.factors[place, : len(packed.factors)].copy_(packed.factors, non_blocking=True)
                self.updates.table[place].copy_(packed.table, non_blocking=True)
                self.updates.scales[place].copy_(packed.scales, non_blocking=True)
        return places


class AdaptedLinear(nn.Module):
    """A product to which the adapters of a step add their updates."""

    def __init__(self, plain: nn.Module, adapters: CudaAdapters, product: Product) -> None:
        super().__init__()
        self.plain = plain
        self._adapters, self._number = adapters, product.number
        self._most_ranks = product.parts * adapters.most_ranks

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        out: Tensor = self.plain(x)
        add_updates(x, out, self._adapters.updates, self._adapters.tiles, self._number, self._most_ranks)
        return out


def products_of(targets: Targets, part: ModelCut | None = None) -> dict[str, Product]:
    """Returns the products that adapters can update, by the paths of their modules; of a rank, those of its part."""
    products: dict[str, Product] = {}
    for target in targets.products.values():
        number, inputs, outputs, parts = products.get(target.path, Product(len(products), target.inputs, 0, 0))
        products[target.path] = Product(number, inputs, outputs + target.outputs, parts + 1)
    if part is not None:
        for path, whole in products.items():
            outputs, inputs = cut_shape((whole.outputs, whole.inputs), part.held(f"{path}.weight"))
            products[path] = whole._replace(inputs=inputs, outputs=outputs)
    return products


def gather(places: Int64, most: int) -> tuple[Int32, Int64]:
    """Returns `Tiles` of the tokens whose adapters are in `places` [T], -1: none. `most` tiles are there.

    >>> tiles, tokens = gather(np.array([1, -1, 0, 1]), 3)
    >>> tiles.tolist(), tokens.tolist()
    ([[0, 0, 1], [1, 1, 3], [-1, -1, -1]], [2, 0, 3])
    """
    order = np.argsort(places, kind="stable")[np.count_nonzero(places < 0) :]
    tiles = np.full((most, 3), -1, np.int32)
    used, firsts, counts = np.unique(places[order], return_index=True, return_counts=True)
    number = 0
    for place, first, count in zip(used.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        for begin in range(first, first + count, ROWS):
            tiles[number] = place, begin, min(begin + ROWS, first + count)
            number += 1
    return tiles, order
