"""Lists the blocks of a step's rows one after the other, as attention reads them that knows no block tables."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.attention_layer import Batch
from pagewire.kernels.triton.jit import jit

BLOCK = 1024


@jit
def page_indices_kernel(
    indices: tl.tensor,
    starts: tl.tensor,
    block_tables: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    cu_queries: tl.tensor,
    table_width: tl.int32,
    window: tl.int32,
    dummy: tl.int32,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK entries of one row."""
    row = tl.program_id(0)
    first = tl.load(starts + row)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = entries < tl.load(starts + row + 1) - first
    length = tl.load(lengths + row)
    queries = tl.load(cu_queries + row + 1) - tl.load(cu_queries + row)
    # What a window has left behind may be another sequence's by now. The first block that is seen stands for it.
    least = tl.where(window > 0, tl.maximum(length - queries - window + 1, 0), 0)
    slot = tl.load(slots + row).to(tl.int64)
    places = block_tables + slot * table_width + tl.maximum(entries, least // BLOCK_SIZE)
    block = tl.load(places, mask=real & (length > 0), other=0)
    tl.store(indices + first + entries, tl.where(length > 0, block, dummy), mask=real)


def page_indices(
    batch: Batch, starts: torch.Tensor, window: int, dummy: int, block_size: int, out: torch.Tensor
) -> None:
    """Writes to `out` the blocks of the rows of a batch; those of row r are out[starts[r] : starts[r + 1]].

    `starts` is int32 [R + 1] for the first R rows of the batch, with as many entries per row as its length needs. A
    dead row has `dummy` instead. With a `window` (0: none) no entry is a block that the row's queries do not see.
    """
    grid = len(starts) - 1, triton.cdiv(batch.block_tables.shape[1], BLOCK)
    page_indices_kernel[grid](
        out,
        starts,
        batch.block_tables,
        batch.slots,
        batch.lengths,
        batch.cu_queries,
        batch.block_tables.stride(0),
        window,
        dummy,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
    )
