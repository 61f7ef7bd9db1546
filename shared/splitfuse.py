"""Dynamic SplitFuse: what one step computes. Shared by the executor, which obeys it, and whoever predicts it.

Source: DeepSpeed-FastGen (Holmes et al., 2024). Long prompts are split over steps and short ones fused, so that every
step has the same number of tokens; decoding rows always come first and are never delayed by a prompt.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


class Pending(NamedTuple):
    """What each slot could compute next, as columns in the order in which prompts are served."""

    slots: Int64
    """[N] rows in the executor's tables; none twice."""
    remaining: Int64
    """[N] known tokens whose KV is not written: 1 is a decode, more is a prompt. Not negative."""
    room: Int64
    """[N] positions that the slot's limit still allows; none of them where it is not positive."""


class Rows(NamedTuple):
    """The parts of one step, as columns."""

    slots: Int64
    """[R] rows in the executor's tables; none twice."""
    query_lens: Int64
    """[R] positions to compute, at least 1."""


def compose(pending: Pending, budget: int) -> Rows:
    """The rows of one step: every decode, then prompt chunks in the given order until `budget` tokens are reached.

    A slot without work or at its limit is skipped and delays nobody. The budget is filled exactly unless work runs out.
    """
    slots, remaining, room = pending
    open_, decoding = room > 0, remaining == 1
    ready = decoding & open_
    if np.count_nonzero(ready) == len(slots) <= budget:  # so most steps are
        return Rows(slots, np.ones(len(slots), np.int64))
    decodes = slots[ready][:budget]
    waiting = open_ & (remaining > 1)
    if not waiting.any():
        return Rows(decodes, np.ones_like(decodes))
    filled = np.minimum(np.cumsum(np.minimum(remaining, room)[waiting]), budget - len(decodes))
    query_lens = np.diff(filled, prepend=0)
    query_lens = query_lens[query_lens > 0]  # the budget runs out once: those left out are the last
    prompts = slots[waiting][: len(query_lens)]
    return Rows(np.concatenate((decodes, prompts)), np.concatenate((np.ones_like(decodes), query_lens)))
