"""The state of each slot's sequence on the device, changed by plans and by steps."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SequenceState:
    """int32 tensors with S rows, one per slot."""

    tokens: torch.Tensor
    """[S, max_model_len + 1] ids of the prompt and the generated tokens."""
    known: torch.Tensor
    """[S] number of valid entries in `tokens`."""
    computed: torch.Tensor
    """[S] number of leading positions whose KV is written."""
    limit: torch.Tensor
    """[S] number of positions that may be written."""
    last: torch.Tensor
    """[S] maximum sequence length: prompt tokens plus the maximum number of generated tokens."""
    alive: torch.Tensor
    """[S] 1 until the device ends the sequence; 0 makes its rows dead."""
    block_tables: torch.Tensor
    """[S, blocks] block ids; block i holds positions [i * block_size, (i + 1) * block_size)."""
