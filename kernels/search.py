"""Which sequence a program or a token belongs to, found on the device from cumulative lengths."""

import triton.language as tl

from pagewire.kernels.jit import jit


@jit
def find_row(cumulative: tl.tensor, index: tl.tensor, rows: tl.tensor, DIVISOR: tl.constexpr, SLACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Last row r in [0, rows) with `cumulative[r] // DIVISOR + r * SLACK <= index`.

    `cumulative` is int32 [rows + 1], from 0, not falling. With DIVISOR = 1 and SLACK = 0 that is the row which owns
    element `index`. With DIVISOR = B and SLACK = 1 every row owns at least ceil(length / B) indices, and all of them
    together `total // B + rows`: a grid of that size needs no lengths on the host.
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
