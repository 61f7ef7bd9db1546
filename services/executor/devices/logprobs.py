"""Reports on tokens beside their ids: log-probabilities or logits, of the token and of the likeliest ones there."""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.services.executor.devices.protocol import Int64, Logprobs, StepBatch
from pagewire.shared.messages.step import LOWEST_LOGPROB

Int32 = npt.NDArray[np.int32]

SLICE_BYTES = 64 << 20
"""Bytes of a prompt's logits that are in memory at a time."""


class LogprobsMode(Enum):
    """The kind of number reported of sampled tokens, as `--logprobs-mode` names it. Prompts get `RAW_LOGPROBS`."""

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def processed(self) -> bool:
        """Whether edits, temperature and filters count."""
        return self in {LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS}

    @property
    def normalized(self) -> bool:
        """Whether logits are turned into log-probabilities."""
        return self in {LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS}


def reduce_logprobs(logits: Tensor, tokens: Tensor, num_logprobs: int, *, normalized: bool = True) -> Tensor:
    """Returns the report on `tokens` int64 [M], by the logits that they were sampled from, as one tensor.

    The result is int32 [M, 2 E + 1] on the device of the logits, for E = `num_logprobs` entries: their ids, the bits of
    their values, and the rank of the token. Nothing waits for the device.

    Args:
        logits: float32 [M, V].
        tokens: [M]; a negative one has an arbitrary result.
        num_logprobs: entries of each token, its own included, at least 1.
        normalized: whether to report log-probabilities instead of logits.
    """
    tokens = tokens.clamp_min(0)
    own = logits.gather(1, tokens[:, None])
    best = logits.topk(min(num_logprobs - 1, logits.shape[1]), dim=1)
    ranks = (logits >= own).sum(dim=1, keepdim=True)
    values = torch.cat((own, best.values), dim=1)
    if normalized:
        values = values - logits.logsumexp(dim=1, keepdim=True)
    ids = torch.cat((tokens[:, None], best.indices), dim=1)
    return torch.cat((ids.int(), values.clamp_min(LOWEST_LOGPROB).view(torch.int32), ranks.int()), dim=1)


def unpack_logprobs(reduced: Int32, rows: Int64, positions: Int64, counts: Int64) -> Logprobs:
    """Returns the result of `reduce_logprobs` as `Logprobs`, with `counts` [M] entries of each token."""
    most = reduced.shape[1] // 2
    counts = np.minimum(counts, most)
    entries = np.arange(most) < counts[:, None]
    ids = reduced[:, :most][entries].astype(np.int64)
    values = np.ascontiguousarray(reduced[:, most:-1]).view(np.float32)[entries]
    return Logprobs(rows, positions, counts, ids, values, reduced[:, -1].astype(np.int64))


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs | None:
    """Returns the parts as one; None if there are none."""
    if not parts:
        return None
    return Logprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in Logprobs.__slots__))


class PromptSlice(NamedTuple):
    """Some tokens of prompts in a batch, of which log-probabilities are reported."""

    places: Int64
    """[M] index in the batch of the token before each of them."""
    tokens: Int64
    """[M] their ids."""
    rows: Int64
    """[M] row in the batch of each."""
    positions: Int64
    """[M] position of each in its sequence."""
    counts: Int64
    """[M] entries to report of each."""


def prompt_slices(batch: StepBatch, num_logprobs: Int64, vocab_size: int) -> Iterator[PromptSlice]:
    """Yields the tokens `batch.next_ids` in slices whose logits are small enough.

    `num_logprobs` [slots] is the number of entries to report of each token of a slot.
    """
    if batch.next_ids is None:
        return
    places = np.flatnonzero(batch.next_ids >= 0)
    owners = np.repeat(np.arange(len(batch.slots)), batch.query_lens)[places]
    size = max(1, SLICE_BYTES // (4 * vocab_size))
    for begin in range(0, len(places), size):
        part, rows = places[begin : begin + size], owners[begin : begin + size]
        counts = num_logprobs[batch.slots[rows]]
        yield PromptSlice(part, batch.next_ids[part], rows, batch.positions[part] + 1, counts)
