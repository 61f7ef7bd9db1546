"""Prepares the inputs of a step on the device from the slots' state, so that a decode needs no data from the host."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.jit import jit
from pagewire.kernels.triton.step.sequence_state import SequenceState

BLOCK = 256


@jit
def owner(cumulative: tl.tensor, lane: tl.tensor, rows: tl.int32, halvings: tl.int32):  # type: ignore[no-untyped-def]
    """Returns the last row whose part begins at or before the lane, given where parts begin, `cumulative` [R + 1]."""
    low = lane * 0
    high = low + rows
    for _ in range(halvings):
        open_ = low < high
        middle = (low + high) // 2
        before = tl.load(cumulative + middle, mask=open_, other=0) <= lane
        low = tl.where(open_ & before, middle + 1, low)
        high = tl.where(open_ & (before == 0), middle, high)
    return low - 1


@jit
def step_inputs_kernel(
    ids: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    num_computed_tokens: tl.tensor,
    lengths: tl.tensor,
    place_slots: tl.tensor,
    ends: tl.tensor,
    place_tokens: tl.tensor,
    place_drafts: tl.tensor,
    slots: tl.tensor,
    cu_queries: tl.tensor,
    cu_places: tl.tensor,
    state_tokens: tl.tensor,
    known: tl.tensor,
    computed: tl.tensor,
    limit: tl.tensor,
    alive: tl.tensor,
    block_tables: tl.tensor,
    rows: tl.int32,
    count: tl.int32,
    sampled: tl.int32,
    context: tl.int32,
    table_width: tl.int32,
    dummy: tl.int32,
    halvings: tl.int32,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK rows, BLOCK tokens and BLOCK places. Tokens and places find their row by binary search, all
    lanes at once."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    mask = lane < rows
    width = tl.load(cu_queries + lane + 1, mask=mask, other=0) - tl.load(cu_queries + lane, mask=mask, other=0)
    slot = tl.load(slots + lane, mask=mask, other=0)
    start = tl.load(computed + slot, mask=mask, other=0)
    end = start + width
    total = tl.load(known + slot, mask=mask, other=0)
    room = tl.minimum(tl.load(limit + slot, mask=mask, other=0), total)
    runs = (tl.load(alive + slot, mask=mask, other=0) != 0) & (width > 0) & (end <= room)
    tl.store(num_computed_tokens + lane, tl.where(runs, start, -1), mask=mask)
    tl.store(lengths + lane, tl.where(runs, end, 0), mask=mask)

    row = owner(cu_queries, lane, rows, halvings)
    owned = (row < rows) & (lane < tl.load(cu_queries + rows)) & (lane < count)
    slot = tl.load(slots + row, mask=owned, other=0)
    first = tl.load(cu_queries + row, mask=owned, other=0)
    width = tl.load(cu_queries + row + 1, mask=owned, other=0) - first
    start = tl.load(computed + slot, mask=owned, other=0)
    room = tl.minimum(tl.load(limit + slot, mask=owned, other=0), tl.load(known + slot, mask=owned, other=0))
    runs = owned & (tl.load(alive + slot, mask=owned, other=0) != 0) & (start + width <= room)
    position = tl.where(runs, start + lane - first, 0)
    token = tl.load(state_tokens + slot.to(tl.int64) * context + position, mask=runs, other=0)
    entry = slot.to(tl.int64) * table_width + position // BLOCK_SIZE
    block = tl.load(block_tables + entry, mask=runs, other=0)
    block = tl.where(runs, block, dummy).to(tl.int64)
    offset = tl.where(runs, position, lane) % BLOCK_SIZE
    mask = lane < count
    tl.store(ids + lane, token, mask=mask)
    tl.store(positions + lane, position, mask=mask)
    tl.store(places + lane, block * BLOCK_SIZE + offset, mask=mask)

    row = owner(cu_places, lane, rows, halvings)
    owned = (row < rows) & (lane < tl.load(cu_places + rows)) & (lane < sampled)
    slot = tl.load(slots + row, mask=owned, other=0)
    first = tl.load(cu_queries + row, mask=owned, other=0)
    last = tl.load(cu_queries + row + 1, mask=owned, other=0)
    behind = tl.load(cu_places + row + 1, mask=owned, other=0) - 1 - lane
    end = tl.load(computed + slot, mask=owned, other=0) + last - first
    samples = owned & (end == tl.load(known + slot, mask=owned, other=-1)) & (last > first)
    samples &= (tl.load(alive + slot, mask=owned, other=0) != 0) & (end <= tl.load(limit + slot, mask=owned, other=0))
    mask = lane < sampled
    tl.store(place_slots + lane, slot, mask=mask)
    tl.store(ends + lane, tl.where(samples, end - behind, -1), mask=mask)
    tl.store(place_tokens + lane, tl.where(owned, tl.maximum(last - 1 - behind, 0), 0), mask=mask)
    tl.store(place_drafts + lane, tl.where(owned, lane - tl.load(cu_places + row, mask=owned, other=0), 0), mask=mask)


@dataclass(frozen=True, slots=True)
class SampledPlaces:
    """The places of a step where tokens are sampled, row after row: int32 [P]. A row has one behind its last token, and
    one before each of its drafted tokens."""

    slots: torch.Tensor
    """Slot of the row; 0 for padding."""
    ends: torch.Tensor
    """Position of the token that is sampled there; -1 if none is."""
    tokens: torch.Tensor
    """Index in the step of the token before; 0 for padding."""
    drafts: torch.Tensor
    """Number of the row's drafted tokens before it."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step of R rows and T tokens; int32 except for `places`."""

    ids: torch.Tensor
    """[T] token ids; 0 for padding and rows that do not run."""
    positions: torch.Tensor
    """[T] positions within the sequences; 0 for padding and rows that do not run."""
    places: torch.Tensor
    """int64 [T] targets of keys and values, block * block_size + offset; in the dummy block where `ids` is padding."""
    num_computed_tokens: torch.Tensor
    """[R] first position that the row writes; -1 if the row is dead, empty, or beyond its limit."""
    lengths: torch.Tensor
    """[R] number of cached positions after the step, those of drafted tokens included; 0 if the row does not run."""
    sampled: SampledPlaces
    """Where tokens are sampled."""


def step_inputs(
    state: SequenceState,
    slots: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_places: torch.Tensor,
    dummy: int,
    block_size: int,
    inputs: StepInputs,
) -> None:
    """Fills `inputs` for rows that compute the next `cu_queries.diff()` positions of `slots`, and sample at
    `cu_places.diff()` places if the last of them is the last known token, drafted ones included.

    `slots` [R], without duplicates, `cu_queries` and `cu_places` [R + 1] are int32. A row runs only if its slot is
    alive, all its tokens are known, and its limit allows all its positions. `dummy` is a block that belongs to no
    sequence.
    """
    rows, count, sampled = len(slots), len(inputs.ids), inputs.sampled
    step_inputs_kernel[(triton.cdiv(max(rows, count, len(sampled.ends)), BLOCK),)](
        inputs.ids,
        inputs.positions,
        inputs.places,
        inputs.num_computed_tokens,
        inputs.lengths,
        sampled.slots,
        sampled.ends,
        sampled.tokens,
        sampled.drafts,
        slots,
        cu_queries,
        cu_places,
        state.tokens,
        state.known,
        state.computed,
        state.limit,
        state.alive,
        state.block_tables,
        rows,
        count,
        len(sampled.ends),
        state.tokens.shape[1],
        state.block_tables.stride(0),
        dummy,
        rows.bit_length(),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
    )
