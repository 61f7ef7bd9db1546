"""The most likely tokens of rows, from which beam search chooses in the scheduler."""

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.devices.protocol import Candidates, Int64

_LOWEST = torch.finfo(torch.float32).min


def top_candidates(logits: Tensor, rows: Int64, num_candidates: Int64) -> Candidates:
    """Returns the `num_candidates` [R] most likely tokens of the batch's `rows` [R], by float32 logits [R, V].

    Rows with `num_candidates` 0 are left out. NaN counts as impossible, and an impossible token has the lowest finite
    log-probability.
    """
    selected = np.flatnonzero(num_candidates)
    counts = np.minimum(num_candidates[selected], logits.shape[1])
    logprobs = torch.log_softmax(logits[torch.from_numpy(selected).to(logits.device)], dim=1)
    logprobs = logprobs.nan_to_num(nan=_LOWEST, neginf=_LOWEST)
    best = logprobs.topk(int(counts.max()), dim=1)
    kept = np.arange(best.indices.shape[1]) < counts[:, None]
    return Candidates(rows[selected], counts, best.indices.cpu().numpy()[kept], best.values.cpu().numpy()[kept])
