"""The logits that are left after temperature and filters, for reports of processed log-probabilities.

The filters and their order are those of vLLM: temperature, min_p, top_k, top_p. Each one is a lower bound on logits, so
that none needs a sorted vocabulary. All tokens whose logits equal the bound are kept, as by the samplers of devices.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.shared.sampling_parameters import Record

CANDIDATES = 1024
"""Number of the largest logits that are tried for top_p before the whole vocabulary is sorted."""


def processed_logits(logits: Tensor, records: Record) -> Tensor:
    """Returns edited logits [R, V] after temperature and filters: minus infinity where no token can be sampled.

    Greedy rows are returned unchanged. `records` [R] are the sampling parameters of the rows.
    """
    out = logits.clone()
    drawn = np.flatnonzero(records["temperature"])
    if drawn.size:
        records, index = records[drawn], torch.from_numpy(drawn).to(logits.device)
        temperatures = _column(records["temperature"], logits)
        peaks = logits[index].amax(dim=1, keepdim=True)
        scaled = (logits[index] - peaks).div_(temperatures)
        _filter(scaled, records)
        out[index] = scaled + peaks / temperatures
    return out


def _filter(scaled: Tensor, records: Record) -> None:
    """Sets the logits [R, V] that the filters drop to -inf. The largest logit of each row is 0."""
    min_p, top_k, top_p = records["min_p"], records["top_k"], records["top_p"]
    limited = (top_k > 0) & (top_k < scaled.shape[1])
    nucleus = top_p < 1
    for group in (~limited & ~nucleus & (min_p > 0), limited, ~limited & nucleus):
        if not group.any():
            continue
        index = torch.from_numpy(np.flatnonzero(group)).to(scaled.device)
        some = scaled[index]
        bound = _column(np.log(min_p[group], where=min_p[group] > 0, out=np.full(group.sum(), -np.inf)), scaled)
        if limited[group].any():
            best = some.topk(int(top_k[group].max())).values
            bound = torch.maximum(bound, best.gather(1, _column(top_k[group], scaled, torch.int64) - 1))
        elif nucleus[group].any():
            best = some.topk(min(CANDIDATES, some.shape[1])).values
        if nucleus[group].any():
            raised = _nucleus(some, best, bound, _column(top_p[group], scaled, torch.float64))
            # A share of 1 is reached one token too early or too late where sums are rounded.
            bound = torch.where(_column(nucleus[group], scaled, torch.bool), raised, bound)
        scaled[index] = some.masked_fill_(some < bound, -torch.inf)


def _nucleus(scaled: Tensor, best: Tensor, bound: Tensor, top_p: Tensor) -> Tensor:
    """Returns the bound [R, 1], raised as far as the tokens above it still hold the share `top_p` of the weight.

    `best` [R, K] holds the largest logits in descending order; a row for which they do not suffice is sorted.
    """
    share = top_p * _weights(scaled, bound).sum(dim=1, keepdim=True)
    reached = _weights(best, bound).cumsum(dim=1)
    short = ((reached[:, -1:] < share) & (best[:, -1:] > bound)).squeeze(1)
    last = torch.searchsorted(reached, share).clamp_max(best.shape[1] - 1)
    raised = torch.maximum(bound, best.gather(1, last))
    if short.any():
        raised[short] = _nucleus(scaled[short], scaled[short].sort(descending=True).values, bound[short], top_p[short])
    return raised


def _weights(scaled: Tensor, bound: Tensor) -> Tensor:
    return scaled.exp().masked_fill_(scaled < bound, 0.0).double()


def _column(values: npt.NDArray[np.generic], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device, dtype)[:, None]
