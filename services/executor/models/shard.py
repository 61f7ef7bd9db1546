"""The part of a model that one of several ranks computes, and the sums that ranks share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from pagewire.shared.errors import ConfigurationError

Ranges = tuple[range, ...]
"""Indices of a dimension of a tensor, in rising order."""
Slices = Mapping[int, Ranges]
"""The indices that a part of a tensor has, by dimension; it has all indices of the others."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks, which together compute a model.

    Raises:
        ValueError: there is no such rank.
    """

    rank: int
    size: int
    by_expert: bool = False
    """Whether a rank has whole experts instead of a part of each."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"there is no rank {self.rank} of {self.size}")

    @property
    def alone(self) -> bool:
        """Whether this rank computes the whole model."""
        return self.size == 1

    def part(self, total: int, unit: int = 1) -> range:
        """Returns the indices of `total` that this rank has: whole units of so many, of which the first ranks may have
        one more than the last.

        >>> [list(Shard(rank, 3).part(8)) for rank in range(3)]
        [[0, 1, 2], [3, 4, 5], [6, 7]]
        >>> [Shard(rank, 2).part(40, unit=16) for rank in range(2)]
        [range(0, 32), range(32, 40)]
        """
        units = -(-total // unit)
        each, more = divmod(units, self.size)
        first = self.rank * each + min(self.rank, more)
        last = first + each + (self.rank < more)
        return range(min(first * unit, total), min(last * unit, total))


ALONE = Shard(0, 1)
"""The rank that computes the whole model."""


@dataclass(frozen=True, slots=True)
class Units:
    """The numbers of outputs and inputs of matrices between which they may be cut."""

    outputs: int = 1
    inputs: int = 1


def largest_units(several: Iterable[Units]) -> Units:
    """Returns the least units that are whole units of all.

    >>> largest_units([Units(8, 1), Units(1, 128), Units(1, 32)])
    Units(outputs=8, inputs=128)
    """
    units = list(several)
    return Units(lcm(*(one.outputs for one in units)), lcm(*(one.inputs for one in units)))


class Collectives(Protocol):
    """Operations on tensors of all ranks. Each rank calls them in the same order, with tensors of the same shape.

    Numbers are added in the order of the ranks, so that all ranks get the same bits.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' `x`, of any shape and floating dtype, in its place."""

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns [R, sum of sizes], the columns of all ranks in their order, of which `part` [R, width] is one's own.

        `sizes` are the numbers of columns of all ranks.
        """


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """A rank's rows of the vocabulary."""

    rows: range
    sizes: tuple[int, ...]
    """The number of rows of each rank."""
    collectives: Collectives

    @classmethod
    def of(cls, vocab_size: int, shard: Shard, unit: int, collectives: Collectives) -> "VocabularyPart":
        """Returns the part of a rank, in units of so many rows."""
        sizes = tuple(len(Shard(rank, shard.size).part(vocab_size, unit)) for rank in range(shard.size))
        return cls(shard.part(vocab_size, unit), sizes, collectives)

    def look_up(self, embed: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
        """Returns the embeddings [T, D] of ids [T], of which `embed` has the rank's rows."""
        local = token_ids - self.rows.start
        outside = (local < 0) | (local >= len(self.rows))
        return self.collectives.all_reduce(embed(local.masked_fill(outside, 0)).masked_fill_(outside[:, None], 0))

    def gather(self, logits: Tensor) -> Tensor:
        """Returns the logits [R, V] of all ranks, of which `logits` [R, rows] are the rank's."""
        return self.collectives.all_gather(logits, self.sizes)


def take(tensor: Tensor, slices: Slices) -> Tensor:
    """Returns the part of a tensor that has these indices; a view where each dimension has one range.

    >>> take(torch.arange(12).view(3, 4), {0: (range(1, 3),), 1: (range(0, 1), range(3, 4))}).tolist()
    [[4, 7], [8, 11]]
    """
    for dim, ranges in slices.items():
        parts = [tensor.narrow(dim, part.start, len(part)) for part in ranges]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def true_runs(flags: Tensor) -> Ranges:
    """Returns the ranges of a tensor of booleans in which all are true.

    >>> true_runs(torch.tensor([True, True, False, True]))
    (range(0, 2), range(3, 4))
    """
    edges = torch.nn.functional.pad(flags.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
    return tuple(range(*pair) for pair in zip(edges[::2], edges[1::2], strict=True))


def cut_shape(shape: tuple[int, ...], slices: Slices) -> tuple[int, ...]:
    """Returns the shape of the part of a tensor of `shape` that has these indices.

    >>> cut_shape((8, 64), {0: (range(0, 2), range(4, 6))})
    (4, 64)
    """
    sizes = list(shape)
    for dim, ranges in slices.items():
        sizes[dim] = sum(map(len, ranges))
    return tuple(sizes)


def cut_inner(features: int, shard: Shard, units: Units) -> range:
    """Returns a rank's part of inner features, which are outputs of one matrix and inputs of the next.

    Raises:
        ConfigurationError: there are too few for the ranks.

    >>> cut_inner(96, Shard(1, 2), Units(outputs=8, inputs=32))
    range(64, 96)
    """
    unit = lcm(units.outputs, units.inputs)
    if -(-features // unit) < shard.size:
        refuse_cut(shard, features, "inner features", unit)
    return shard.part(features, unit)


def refuse_cut(shard: Shard, total: int, what: str, unit: int) -> NoReturn:
    """Refuses to cut so many features.

    Raises:
        ConfigurationError: always.
    """
    units = f", cut in units of {unit}" if unit > 1 else ""
    raise ConfigurationError(
        f"the model has {total} {what}{units}, too few for tensor-parallel-size {shard.size}: set it to at most "
        f"{-(-total // unit)}"
    )
