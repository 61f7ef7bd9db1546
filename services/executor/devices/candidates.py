"""The most likely tokens of rows, from which beam search chooses in the scheduler."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.services.executor.devices.protocol import Candidates, Int64

MAX_CANDIDATES = 128
"""Maximum candidates per row: bounds the size of a step's message, and is more than a beam search needs."""

_LOWEST = torch.finfo(torch.float32).min


def reduce_candidates(logits: Tensor, num_candidates: int) -> Tensor:
    """Returns the `num_candidates` most likely tokens of each row, by float32 logits [M, V], as one tensor.

    The result is int32 [M, 2 C] on the device of the logits, for C candidates: their ids, and the bits of their
    log-probabilities. NaN counts as impossible, and an impossible token has the lowest finite log-probability. Nothing
    waits for the device.
    """
    logprobs = torch.log_softmax(logits, dim=1).nan_to_num(nan=_LOWEST, neginf=_LOWEST)
    best = logprobs.topk(min(num_candidates, logits.shape[1]), dim=1)
    return torch.cat((best.indices.int(), best.values.view(torch.int32)), dim=1)


def unpack_candidates(reduced: npt.NDArray[np.int32], rows: Int64, counts: Int64) -> Candidates:
    """Returns the result of `reduce_candidates` for the batch's `rows` [M], with up to `counts` [M] of each."""
    most = reduced.shape[1] // 2
    counts = np.minimum(counts, most)
    entries = np.arange(most) < counts[:, None]
    logprobs = np.ascontiguousarray(reduced[:, most:]).view(np.float32)
    return Candidates(rows, counts, reduced[:, :most][entries].astype(np.int64), logprobs[entries])


def top_candidates(logits: Tensor, rows: Int64, num_candidates: Int64) -> Candidates:
    """Returns the `num_candidates` [R] most likely tokens of the batch's `rows` [R], by float32 logits [R, V].

    Rows with `num_candidates` 0 are left out. See `reduce_candidates`.
    """
    selected = np.flatnonzero(num_candidates)
    counts = num_candidates[selected]
    reduced = reduce_candidates(logits[torch.from_numpy(selected)], int(counts.max()))
    return unpack_candidates(reduced.numpy(), rows[selected], counts)
