"""The likeliest tokens of rows, for searches that choose elsewhere."""

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.devices.protocol import Candidates, Int64

_LOWEST = torch.finfo(torch.float32).min


def likeliest(logits: Tensor, rows: Int64, wanted: Int64) -> Candidates:
    """The `wanted` [R] likeliest tokens by float32 logits [R, V] of the batch's `rows` [R]; 0 wants none.

    A NaN counts as impossible, and an impossible token has the lowest finite log-probability.
    """
    asking = np.flatnonzero(wanted)
    counts = np.minimum(wanted[asking], logits.shape[1])
    logprobs = torch.log_softmax(logits[torch.from_numpy(asking).to(logits.device)], dim=1)
    logprobs = logprobs.nan_to_num(nan=_LOWEST, neginf=_LOWEST)
    best = logprobs.topk(int(counts.max()), dim=1)
    kept = np.arange(best.indices.shape[1]) < counts[:, None]
    return Candidates(rows[asking], counts, best.indices.cpu().numpy()[kept], best.values.cpu().numpy()[kept])
