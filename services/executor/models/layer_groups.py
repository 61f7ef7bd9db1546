"""Divides the layers of a model into groups that share a block table and, block by block, the same memory.

Layers that see all positions are in other groups than those with a window, which give back blocks. All groups have the
same number of layers, so that a block of the pool fits each of them, as in vLLM's hybrid KV cache manager.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pagewire.kernels.attention_layer import Attention

MAX_GROUPS = 8
"""Maximum number of groups: each costs a look-up per step, and a block per entry of a table."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's layers. Groups that see all positions come first."""

    windows: tuple[int, ...]
    """Per group, how many positions a query sees, its own included; 0: all."""
    groups: tuple[int, ...]
    """Per layer, its group."""
    places: tuple[int, ...]
    """Per layer, its place within the group. Layers with the same place share memory."""

    @property
    def shared(self) -> tuple[int, ...]:
        """Per place, a layer that has it."""
        return tuple(self.places.index(place) for place in range(max(self.places) + 1))


def group_layers(layers: Sequence[Attention]) -> LayerGroups:
    """Returns the groups of these layers: at most `MAX_GROUPS`, with as few places as possible without a layer.

    Layers whose keys and values differ in shape cannot share memory: they are all in one group, which sees all.
    """
    kinds = [layer.window or layer.chunk for layer in layers]
    if len({(layer.kv_heads, layer.head_size, layer.value_head_size) for layer in layers}) > 1:
        kinds = [0] * len(layers)
    counts = Counter(kinds)
    sizes = [size for size in range(1, len(layers) + 1) if _count(counts.values(), size) <= MAX_GROUPS]
    size = min(sizes, key=lambda size: (_count(counts.values(), size) * size, -size))
    windows: list[int] = []
    groups, places = [0] * len(layers), [0] * len(layers)
    for window in sorted(counts, key=lambda window: (window > 0, -window)):
        members = iter([i for i, kind in enumerate(kinds) if kind == window])
        while part := list(islice(members, size)):
            for place, layer in enumerate(part):
                groups[layer], places[layer] = len(windows), place
            windows.append(window)
    return LayerGroups(tuple(windows), tuple(groups), tuple(places))


def _count(kinds: Iterable[int], size: int) -> int:
    """Returns the number of groups of `size` layers for so many layers of each kind."""
    return sum(-(-count // size) for count in kinds)
