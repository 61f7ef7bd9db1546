"""The part of a model that one of several ranks computes, and the sums that ranks share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks, which together compute a model.

    Raises:
        ValueError: there is no such rank.
    """

    rank: int
    size: int

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


class Collectives(Protocol):
    """Operations on tensors of all ranks. Each rank calls them in the same order, with tensors of the same shape.

    Numbers are added in the order of the ranks, so that all ranks get the same bits.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' `x`, of any shape and floating dtype, in its place."""

    def all_gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns [R, sum of widths], the columns of all ranks in their order, of which `part` [R, width] is one's own.

        `widths` are the numbers of columns of all ranks.
        """
