"""Dynamic SplitFuse, which composes the batch of a step.

Source: DeepSpeed-FastGen (Holmes et al., 2024). Long prompts are split over steps and short ones fused, so that every
step has the same number of tokens; decoding rows always come first and are never delayed by a prompt.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

OTHERS_PER_FORCED = 24
"""Number of sequences without a grammar per position of forced tokens in a step, beyond one position per row and the
first one of the others. The sequences wait at most 4 % longer where the time of a step grows with its positions."""


class PendingTokens(NamedTuple):
    """The work that each slot could do next, as columns in the order in which prompts are served."""

    slots: Int64
    """[N] distinct rows in the executor's tables."""
    remaining: Int64
    """[N] known tokens whose KV is not written yet, at least 0: 1 is a decode, more is a prompt."""
    room: Int64
    """[N] positions up to the slot's limit; a slot with 0 or less is skipped."""


class Rows(NamedTuple):
    """The rows of one step, as columns."""

    slots: Int64
    """[R] rows in the executor's tables; none twice."""
    query_lens: Int64
    """[R] positions to compute, at least 1."""


def compose(pending: PendingTokens, budget: int) -> Rows:
    """Returns the rows of one step: all decodes, then prompt chunks in the given order, `budget` tokens altogether.

    A slot without work or at its limit is skipped. The step has fewer tokens than `budget` only if there is less work.

    >>> slots, remaining, room = np.array([7, 3, 5]), np.array([1, 100, 1]), np.array([9, 200, 9])
    >>> rows = compose(PendingTokens(slots, remaining, room), budget=64)
    >>> rows.slots.tolist(), rows.query_lens.tolist()
    ([7, 5, 3], [1, 1, 62])
    """
    slots, remaining, room = pending
    open_, decoding = room > 0, remaining == 1
    ready = decoding & open_
    if np.count_nonzero(ready) == len(slots) <= budget:  # the common case: only decodes
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


def pace_forced(remaining: Int64, others: int) -> Int64:
    """Returns how many of their `remaining` positions [N], at least 1 each, rows with forced tokens compute in a step.

    `others` is the number of sequences without a grammar in the step. Without others, each row computes all of its
    positions. Beside others, each row computes one position, and the first rows some more.

    >>> pace_forced(np.array([5, 5, 5]), others=0).tolist()
    [5, 5, 5]
    >>> pace_forced(np.array([5, 5, 5]), others=48).tolist()
    [3, 1, 1]
    """
    if not others:
        return remaining
    more = remaining - 1
    left = max(1, others // OTHERS_PER_FORCED) - (more.cumsum() - more)
    paced: Int64 = 1 + np.clip(left, 0, more)
    return paced
