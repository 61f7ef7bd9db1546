"""The end of a step: appends tokens, counts right drafts as computed, and marks finished rows as dead."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.jit import jit
from pagewire.kernels.triton.step.sequence_state import SequenceState

BLOCK = 64
STOP: tl.constexpr = tl.constexpr(1)
LENGTH: tl.constexpr = tl.constexpr(2)
NOT_FINITE: tl.constexpr = tl.constexpr(3)


@jit
def bookkeeping_kernel(
    sampled: tl.tensor,
    finishes: tl.tensor,
    slots: tl.tensor,
    num_computed_tokens: tl.tensor,
    ends: tl.tensor,
    cu_queries: tl.tensor,
    cu_places: tl.tensor,
    stop_ids: tl.tensor,
    seen: tl.tensor,
    state_tokens: tl.tensor,
    known: tl.tensor,
    computed: tl.tensor,
    last: tl.tensor,
    alive: tl.tensor,
    rows: tl.int32,
    context: tl.int32,
    vocabulary: tl.int32,
    STOPS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK rows, whose places follow each other as long as the sampled token is the drafted one."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    slot = tl.load(slots + row, mask=mask, other=0).to(tl.int64)
    start = tl.load(num_computed_tokens + row, mask=mask, other=-1)
    width = tl.load(cu_queries + row + 1, mask=mask, other=0) - tl.load(cu_queries + row, mask=mask, other=0)
    first = tl.load(cu_places + row, mask=mask, other=0)
    count = tl.load(cu_places + row + 1, mask=mask, other=0) - first
    end = tl.load(ends + first, mask=count > 0, other=-1)

    samples = end >= 0
    agrees = samples
    token = first * 0 - 1
    tokens = first * 0
    place = 0
    most = tl.max(count, 0)
    while place < most:
        new = tl.load(sampled + first + place, mask=agrees, other=-1)
        target = state_tokens + slot * context + end + place
        drafted = agrees & (place + 1 < count)
        draft = tl.load(target, mask=drafted, other=-1)
        tl.store(target, new, mask=agrees & (end + place < context))
        counted = agrees & (new >= 0)
        occurrences = seen + slot * vocabulary + new
        tl.store(occurrences, tl.load(occurrences, mask=counted, other=0) + 2, mask=counted)
        token = tl.where(agrees, new, token)
        tokens += agrees.to(tl.int32)
        agrees = drafted & (new == draft)
        place += 1
    wrong = tl.where(samples, count - tokens, 0)
    tl.store(computed + slot, start + width - wrong, mask=start >= 0)
    end += tokens  # behind the last of them
    tl.store(known + slot, end, mask=samples)
    lane = tl.arange(0, PADDED)
    compared = samples[:, None] & (lane < STOPS)[None, :]
    stops = tl.load(stop_ids + slot[:, None] * STOPS + lane[None, :], mask=compared, other=-1)
    stopped = tl.max((compared & (stops == token[:, None])).to(tl.int32), 1) > 0
    full = samples & (end >= tl.load(last + slot, mask=samples, other=0))
    finish = tl.where(stopped, STOP, tl.where(full, LENGTH, 0))
    finish = tl.where(samples & (token < 0), NOT_FINITE, finish)
    tl.store(alive + slot, 0, mask=samples & (finish != 0))
    tl.store(finishes + row, finish.to(tl.uint8), mask=mask)


def bookkeeping(
    state: SequenceState,
    slots: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_places: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    ends: torch.Tensor,
    stop_ids: torch.Tensor,
    sampled: torch.Tensor,
    finishes: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    """Applies the results of a step to `state`. Writes `finishes` uint8 [R]: 0 continues, 1 stopped, 2 at its length,
    3 without a token.

    `slots` and `num_computed_tokens` are int32 [R], `cu_queries` and `cu_places` int32 [R + 1], `ends` (as
    `step_inputs` wrote them) and `sampled` int32 [P], `stop_ids` int32 [S, longest list] padded with -1. A row keeps
    the tokens of its places up to the first that is not the drafted one, and they are counted in
    `SamplingColumns.seen`.
    """
    rows, stops = len(slots), stop_ids.shape[1]
    bookkeeping_kernel[(triton.cdiv(rows, BLOCK),)](
        sampled,
        finishes,
        slots,
        num_computed_tokens,
        ends,
        cu_queries,
        cu_places,
        stop_ids,
        seen,
        state.tokens,
        state.known,
        state.computed,
        state.last,
        state.alive,
        rows,
        state.tokens.shape[1],
        seen.shape[1],
        STOPS=stops,
        PADDED=triton.next_power_of_2(stops),
        BLOCK=BLOCK,
    )
