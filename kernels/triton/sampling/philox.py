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


def reference(key: int, position: int) -> float:
    """Returns `uniform` in Python; `key` is unsigned."""
    words, keys = [position, 0, 0, 0], [key & 0xFFFF_FFFF, key >> 32]
    for _ in range(10):
        even, odd = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (odd >> 32) ^ words[1] ^ keys[0],
            odd & 0xFFFF_FFFF,
            (even >> 32) ^ words[3] ^ keys[1],
            even & 0xFFFF_FFFF,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFF_FFFF, (keys[1] + 0xBB67AE85) & 0xFFFF_FFFF]
    return ((words[0] >> 8) + 0.5) * 2.0**-24
