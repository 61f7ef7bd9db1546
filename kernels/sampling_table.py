"""The sampling parameters of each slot: columns on the device, one row per slot, changed by plans only."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagewire.shared.sampling import RECORD

_DTYPES = {"f": torch.float32, "i": torch.int32, "u": torch.int64}
_TRITON = {torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}

COLUMNS = {name: _DTYPES[RECORD[name].kind] for name in RECORD.names or ()}
"""The columns of a record and their dtypes on the device: real numbers, integers, and bits."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties for earlier tokens. One row per slot."""

    repetition: torch.Tensor
    """float32 [S] divisor of positive and factor of negative logits of tokens in prompt or output; 1: off."""
    presence: torch.Tensor
    """float32 [S] subtracted from the logit of a token in the output; 0: off."""
    frequency: torch.Tensor
    """float32 [S] subtracted once per occurrence of a token in the output; 0: off."""
    seen: torch.Tensor
    """int32 [S, vocabulary] twice the occurrences of a token in the output, plus one if the prompt has the token."""


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Sampling parameters of S slots."""

    columns: Mapping[str, torch.Tensor]
    """Columns [S] with the names and dtypes of `COLUMNS`; see `pagewire.shared.sampling` for their meaning."""
    stop_ids: torch.Tensor
    """int32 [S, longest list] ids that end the sequence, padded with -1."""
    bias_ids: torch.Tensor
    """int32 [S, longest list] ids with a bias, padded with -1, without duplicates."""
    bias: torch.Tensor
    """float32 [S, longest list] biases added to the logits of `bias_ids`."""


SAMPLING_TENSORS = {
    **{name: _TRITON[dtype] for name, dtype in COLUMNS.items()},
    "stop_ids": "i32",
    "bias_ids": "i32",
    "bias": "fp32",
    "repetition": "fp32",
    "presence": "fp32",
    "frequency": "fp32",
    "seen": "i32",
}
"""Element types, for `pagewire.kernels.compile`."""
