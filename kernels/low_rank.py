"""A low-rank update of a matrix (LoRA, Hu et al., 2021)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """An update of consecutive outputs of a product: their weights grow by scale * expand @ shrink."""

    shrink: Tensor
    """[rank, inputs]."""
    expand: Tensor
    """[outputs, rank]."""
    first: int
    """First of the outputs."""
    scale: float
