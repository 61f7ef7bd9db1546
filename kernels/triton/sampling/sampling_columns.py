"""The sampling parameters of each slot: columns on the device, one row per slot, changed by plans only."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagewire.shared.sampling_parameters import RECORD

_DTYPES = {"f": torch.float32, "i": torch.int32, "u": torch.int64}
ALLOWED, BIASED, PENALIZED, BAD_WORDS, GRAMMAR = 1, 2, 4, 8, 16
"""Bits of `SamplingColumns.edits`."""

MAX_STOP_IDS = 1040
"""Maximum stop ids of a slot: a request may name 1024, and a model has some of its own."""
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_IDS = 1024
"""Maximum ids of all bad words of a slot, as many as a request may have."""
CHECKED_STOP_IDS = 16
"""Stop ids that the device checks after every step. The host checks all; a missed one costs a wasted row."""

COLUMNS = {name: _DTYPES[RECORD[name].kind] for name in RECORD.names or ()}
"""The columns of a record and their dtypes on the device: real numbers, integers, and bits."""


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters of S slots."""

    columns: Mapping[str, torch.Tensor]
    """Columns [S] with the names and dtypes of `COLUMNS`; see `shared.sampling_parameters` for their meaning."""
    stop_ids: torch.Tensor
    """int32 [S, longest list] ids that end the sequence, padded with -1."""
    bias_ids: torch.Tensor
    """int32 [S, longest list] ids with a bias, padded with -1, without duplicates."""
    bias: torch.Tensor
    """float32 [S, longest list] biases added to the logits of `bias_ids`."""
    edits: torch.Tensor
    """int32 [S] which of the tables after `stop_ids` count for the slot: the sum of `ALLOWED`, `BIASED`, `PENALIZED`
    and `BAD_WORDS`; and of `GRAMMAR`, if a grammar says of each sampled token which ones are allowed."""
    allowed: torch.Tensor
    """int32 [S, ceil(vocabulary / 32)] a bit per token: token t is bit t % 32 of word t // 32."""
    seen: torch.Tensor
    """int32 [S, vocabulary] twice the occurrences of a token in the output, plus one if the prompt has the token."""
    bad_words: torch.Tensor
    """int32 [S, ids of all words] the ids of texts that may not be generated, one text after the other."""
    bad_word_ends: torch.Tensor
    """int32 [S, words] number of ids up to the end of each text, padded with 0."""
    num_prompt_tokens: torch.Tensor
    """int32 [S] tokens of the sequence that are no output."""
