"""What the device knows of each slot's sequence. Plans change it, and the steps themselves."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SlotState:
    """Columns of S rows, one per slot, int32."""

    tokens: torch.Tensor
    """[S, max_model_len] ids of the prompt and of what was generated."""
    known: torch.Tensor
    """[S] how many of `tokens` there are."""
    computed: torch.Tensor
    """[S] leading positions whose KV is written."""
    limit: torch.Tensor
    """[S] positions that may be written."""
    last: torch.Tensor
    """[S] sequence length at which it ends for its length: prompt and most generated tokens."""
    alive: torch.Tensor
    """[S] 1 until the device itself ends the sequence, then 0: a dead row."""
    block_tables: torch.Tensor
    """[S, blocks] entry i holds positions [i * block_size, (i + 1) * block_size)."""


STATE_TENSORS = dict.fromkeys(("state_tokens", "known", "computed", "limit", "last", "alive", "block_tables"), "i32")
"""Element types, for `pagewire.kernels.compile`."""
