"""The end of a step: appends tokens, advances positions, and marks finished rows as dead."""

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
    """One program: BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    slot = tl.load(slots + row, mask=mask, other=0).to(tl.int64)
    start = tl.load(num_computed_tokens + row, mask=mask, other=-1)
    end = tl.load(ends + row, mask=mask, other=-1)
    width = tl.load(cu_queries + row + 1, mask=mask, other=0) - tl.load(cu_queries + row, mask=mask, other=0)
    tl.store(computed + slot, start + width, mask=start >= 0)

    samples = end >= 0
    token = tl.load(sampled + row, mask=samples, other=-1)
    tl.store(state_tokens + slot * context + end, token, mask=samples & (end < context))
    tl.store(known + slot, end + 1, mask=samples)
    place = seen + slot * vocabulary + token
    counted = samples & (token >= 0)
    tl.store(place, tl.load(place, mask=counted, other=0) + 2, mask=counted)
    lane = tl.arange(0, PADDED)
    compared = samples[:, None] & (lane < STOPS)[None, :]
    stops = tl.load(stop_ids + slot[:, None] * STOPS + lane[None, :], mask=compared, other=-1)
    stopped = tl.max((compared & (stops == token[:, None])).to(tl.int32), 1) > 0
    full = samples & (end + 1 >= tl.load(last + slot, mask=samples, other=0))
    finish = tl.where(stopped, STOP, tl.where(full, LENGTH, 0))
    finish = tl.where(samples & (token < 0), NOT_FINITE, finish)
    tl.store(alive + slot, 0, mask=samples & (finish != 0))
    tl.store(finishes + row, finish.to(tl.uint8), mask=mask)


def bookkeeping(
    state: SequenceState,
    slots: torch.Tensor,
    cu_queries: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    ends: torch.Tensor,
    stop_ids: torch.Tensor,
    sampled: torch.Tensor,
    finishes: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    """Applies the results of a step to `state`. Writes `finishes` uint8 [R]: 0 continues, 1 stopped, 2 at its length,
    3 without a token.

    `slots`, `num_computed_tokens`, `ends` (as `step_inputs` wrote them) and `sampled` are int32 [R], `cu_queries` int32
    [R + 1], `stop_ids` int32 [S, longest list] padded with -1. The sampled token is counted in `SamplingColumns.seen`.
    """
    rows, stops = len(slots), stop_ids.shape[1]
    bookkeeping_kernel[(triton.cdiv(rows, BLOCK),)](
        sampled,
        finishes,
        slots,
        num_computed_tokens,
        ends,
        cu_queries,
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
