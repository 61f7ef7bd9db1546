"""Writes any number of single entries of a table in one launch."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.jit import jit

BLOCK = 256


@jit
def scatter_kernel(
    table: tl.tensor, updates: tl.tensor, count: tl.tensor, width: tl.int32, BLOCK: tl.constexpr
) -> None:
    """One program: BLOCK updates."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < tl.load(count)
    row = tl.load(updates + index * 3, mask=mask, other=0).to(tl.int64)
    column = tl.load(updates + index * 3 + 1, mask=mask, other=0)
    value = tl.load(updates + index * 3 + 2, mask=mask, other=0)
    tl.store(table + row * width + column, value, mask=mask)


def scatter(table: torch.Tensor, updates: torch.Tensor, count: torch.Tensor) -> None:
    """Sets table[row, column] = value for the first `count` rows (row, column, value) of `updates`.

    `table` is int32 [rows, columns], such as block tables by slot, limits, or the bits of floats; `updates` is int32
    [N, 3], without duplicate entries; `count` is int32 [1] on the device, at most N.
    """
    scatter_kernel[(triton.cdiv(len(updates), BLOCK),)](table, updates, count, table.shape[1], BLOCK=BLOCK)
