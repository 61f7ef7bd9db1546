"""Finds the sequence of a program or a token from cumulative lengths, on the device."""

import triton.language as tl

from pagewire.kernels.triton.jit import jit


@jit
def find_row(cumulative: tl.tensor, index: tl.tensor, rows: tl.tensor, DIVISOR: tl.constexpr, SLACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the last row r in [0, rows) with `cumulative[r] // DIVISOR + r * SLACK <= index`.

    `cumulative` is int32 [rows + 1], from 0, not decreasing. With DIVISOR = 1 and SLACK = 0, the row contains element
    `index`. With DIVISOR = B and SLACK = 1, every row has at least ceil(length / B) indices, and all rows together have
    `total // B + rows`, so that the host can size a grid without the lengths.
    """
    low = 0
    high = rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(cumulative + middle) // DIVISOR + middle * SLACK <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1
