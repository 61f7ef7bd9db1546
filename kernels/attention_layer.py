"""Types of the attention kernels: a layer's constants and a step's batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Attention:
    """The constants of a layer's attention. Lengths are in positions."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    """Factor of the product of query and key."""
    window: int = 0
    """Number of positions that a query sees, its own included; 0: all."""
    chunk: int = 0
    """A query sees only the positions of its own chunk of this length; 0: all. Not together with a window."""
    soft_cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: no cap."""
    value_size: int = 0
    """Dimension of a value; 0: `head_size`."""

    @property
    def value_head_size(self) -> int:
        """Dimension of a value."""
        return self.value_size or self.head_size

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step, as int32 tensors on the device. R rows, T tokens."""

    slots: torch.Tensor
    """[R] index of each row's sequence in `block_tables`."""
    lengths: torch.Tensor
    """[R] cached positions, those of this step included; 0 is a dead row, whose output is zero."""
    cu_queries: torch.Tensor
    """[R + 1] index of each row's first token in the step; rows may be empty, the last entry is at most T."""
    block_tables: torch.Tensor
    """[slots, blocks] block ids; block i holds positions [i * block_size, (i + 1) * block_size)."""
