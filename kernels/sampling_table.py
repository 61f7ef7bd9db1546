"""How the tokens of each slot are picked: columns on the device, one row per slot, changed by plans only."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagewire.shared.sampling import RECORD

_DTYPES = {"f": torch.float32, "i": torch.int32, "u": torch.int64}
_TRITON = {torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}

COLUMNS = {name: _DTYPES[RECORD[name].kind] for name in RECORD.names or ()}
"""The columns of a record, with their types on the device: real numbers, integers, and bits."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """What earlier tokens cost. One row per slot."""

    repetition: torch.Tensor
    """float32 [S] divides a positive and multiplies a negative logit of a token in prompt or output; 1: off."""
    presence: torch.Tensor
    """float32 [S] taken from the logit of a token in the output; 0: off."""
    frequency: torch.Tensor
    """float32 [S] taken once per occurrence in the output; 0: off."""
    seen: torch.Tensor
    """int32 [S, vocabulary] twice the occurrences in the output, plus one if the prompt has the token."""


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """S rows, one per slot."""

    columns: Mapping[str, torch.Tensor]
    """[S] each, by the names and of the types in `COLUMNS`; `pagewire.shared.sampling` says what they mean."""
    stop_ids: torch.Tensor
    """int32 [S, most] ids that end the sequence, filled up with -1."""
    bias_ids: torch.Tensor
    """int32 [S, most] ids whose logits are changed, filled up with -1, none twice."""
    bias: torch.Tensor
    """float32 [S, most] what is added to the logits of `bias_ids`."""


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
