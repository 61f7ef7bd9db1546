"""An adapter that has been read and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagewire.kernels.low_rank import LowRank


@dataclass(frozen=True, slots=True)
class Adapter:
    """The updates of a model's matrices (LoRA, Hu et al., 2021)."""

    updates: Mapping[str, Sequence[LowRank]]
    """Updates of each product, by the path of its module in the model."""
