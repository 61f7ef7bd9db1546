"""Samples tokens: one uniform number per token, inverted through the cumulative distribution in vocabulary order.

The number depends on the sequence and the position only, so a sequence that is computed again, elsewhere or in another
batch, gets the same tokens. The filters and their order are those of vLLM: temperature, min_p, top_k, top_p. Each
filter is a lower bound on the logits, so that none needs a sorted vocabulary. All tokens whose logits equal the bound
are kept.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.services.executor.devices.philox import UInt64, philox4x32
from pagewire.shared.sampling_parameters import NOT_FINITE, Record

CANDIDATES = 1024
"""Number of the largest logits that are tried for top_p before the whole vocabulary is sorted."""

_MASK = (1 << 64) - 1


def sequence_key(seed: int, prompt_index: int, choice_index: int) -> int:
    """Returns the 64-bit random key of a completion, by a chain of splitmix64 (Steele et al., 2014)."""
    key = _splitmix64(seed)
    key = _splitmix64(key ^ prompt_index)
    return _splitmix64(key ^ choice_index)


def uniforms(keys: UInt64, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns numbers in (0, 1) [N] for tokens at `positions` [N], below 2**32, of sequences with `keys` [N]."""
    counters = np.zeros((4, len(keys)), np.uint64)
    counters[0] = positions
    bits: npt.NDArray[np.float64] = (philox4x32(counters, keys)[0] >> np.uint64(8)).astype(np.float64)
    return np.multiply(bits + 0.5, 2.0**-24)


def process(logits: Tensor, records: Record) -> Tensor:
    """Returns edited logits [R, V] after temperature and filters: minus infinity where no token can be sampled.

    Those of greedy rows are as they were.
    """
    out = logits.clone()
    drawn = np.flatnonzero(records["temperature"])
    if drawn.size:
        records, index = records[drawn], torch.from_numpy(drawn).to(logits.device)
        heat = _column(records["temperature"], logits)
        peaks = logits[index].amax(dim=1, keepdim=True)
        scaled = (logits[index] - peaks).div_(heat)
        _filter(scaled, records)
        out[index] = scaled + peaks / heat
    return out


def sample(logits: Tensor, records: Record, positions: npt.NDArray[np.int64]) -> Tensor:
    """Returns one token id per row, int64 [R], for float32 logits [R, V]. The logits are overwritten.

    Temperature 0 picks the largest logit, and the lowest id among equal ones. A row with NaN, or whose largest logit is
    infinite, gets `NOT_FINITE` in place of a token.

    Args:
        logits: float32 [R, V].
        records: [R] sampling parameters of each row.
        positions: [R] position of the sampled token in its sequence.
    """
    peaks, picked = logits.max(dim=1)
    finite = peaks.isfinite()
    drawn = np.flatnonzero(records["temperature"])
    if drawn.size:
        records, index = records[drawn], torch.from_numpy(drawn).to(logits.device)
        scaled = logits[index] - peaks[index, None]
        scaled.div_(_column(records["temperature"], logits))
        _filter(scaled, records)
        picked[index] = _invert(scaled.exp_(), uniforms(records["key"], positions[drawn]))
    return picked.masked_fill_(~finite, NOT_FINITE)


def _invert(weights: Tensor, numbers: npt.NDArray[np.float64]) -> Tensor:
    """Returns the first index of each row [R, V] at which the cumulative weight exceeds its number times the total."""
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    target = (total * torch.from_numpy(numbers)[:, None].to(weights.device)).float()
    target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))  # below the total, or nothing is found
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_max(weights.shape[1] - 1)


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
            bound = _nucleus(some, best, bound, _column(top_p[group], scaled, torch.float64))
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


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
