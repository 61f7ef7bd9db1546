"""Element types of the tables that kernels read, and sizes of vocabularies."""

import torch

from pagewire.kernels.triton.sampling.sampling_columns import COLUMNS

_TRITON = {torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}

VOCABULARIES = (128256, 151936, 50272, 32000)
"""Tokens of known models, for `tests.kernels.triton.ahead.compile`."""

SAMPLING_TENSORS = {
    **{name: _TRITON[dtype] for name, dtype in COLUMNS.items()},
    "stop_ids": "i32",
    "bias_ids": "i32",
    "bias": "fp32",
    "edits": "i32",
    "allowed": "i32",
    "seen": "i32",
    "bad_words": "i32",
    "bad_word_ends": "i32",
    "num_prompt_tokens": "i32",
}
"""Element types, for `tests.kernels.triton.ahead.compile`."""

STATE_TENSORS = dict.fromkeys(("state_tokens", "known", "computed", "limit", "last", "alive", "block_tables"), "i32")
"""Element types, for `tests.kernels.triton.ahead.compile`."""
