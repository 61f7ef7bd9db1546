"""One uniform number per sampled token, a function of only the sequence's key and the token's position.

Source: Salmon et al., 2011 (Philox 4x32 of ten rounds).
"""

import triton.language as tl

from pagewire.kernels.triton.jit import jit


@jit
def uniform(key: tl.tensor, position: tl.tensor):  # type: ignore[no-untyped-def]
    """Returns a float64 in (0, 1) with 24 random bits. `key` is 64 bits as int64, `position` 32 bits."""
    zero = position * 0
    word, _, _, _ = tl.philox(key, position, zero, zero, zero)
    return ((word.to(tl.uint32, bitcast=True) >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08
