"""How the tokens of each slot are picked: columns on the device, a row per slot, changed by plans only."""

from dataclasses import dataclass

import torch


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
    """Columns of S rows, one per slot."""

    temperature: torch.Tensor
    """float32 [S]; 0 is greedy."""
    top_p: torch.Tensor
    """float32 [S] in (0, 1]; 1: off."""
    min_p: torch.Tensor
    """float32 [S] in [0, 1]; 0: off."""
    top_k: torch.Tensor
    """int32 [S]; 0: off."""
    key: torch.Tensor
    """int64 [S], the 64 bits of the sequence's key."""
    stop_ids: torch.Tensor
    """int32 [S, most] ids that end the sequence, filled up with -1."""
    floor: torch.Tensor
    """int32 [S] sequence length below which no id of `stop_ids` is picked."""
    bias_ids: torch.Tensor
    """int32 [S, most] ids whose logits are changed, filled up with -1, none twice."""
    bias: torch.Tensor
    """float32 [S, most] what is added to the logits of `bias_ids`."""


SAMPLING_TENSORS = {
    "temperature": "fp32",
    "top_p": "fp32",
    "min_p": "fp32",
    "top_k": "i32",
    "key": "i64",
    "stop_ids": "i32",
    "floor": "i32",
    "bias_ids": "i32",
    "bias": "fp32",
    "repetition": "fp32",
    "presence": "fp32",
    "frequency": "fp32",
    "seen": "i32",
}
"""Element types, for `pagewire.kernels.compile`."""
