"""The reference of the random numbers that every device draws: Philox4x32-10, a counter-based generator.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]
_LOW = np.uint64(0xFFFF_FFFF)
_WORD = np.uint64(32)


def philox4x32(counters: UInt64, keys: UInt64) -> UInt64:
    """Returns 32-bit random words [4, N] for 32-bit counters [4, N] and 64-bit keys [N]."""
    words = np.stack((keys & _LOW, keys >> _WORD))
    even, odd = counters[0::2], counters[1::2]  # words 0 and 2 are multiplied, words 1 and 3 are XORed in
    for round_keys in (words + _ROUNDS * _WEYL) & _LOW:
        products = even * _MULTIPLIERS
        even, odd = (products[::-1] >> _WORD) ^ odd ^ round_keys, products[::-1] & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(keys: UInt64, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1) [N] for tokens at `positions` [N], below 2**32, of sequences with `keys` [N]."""
    counters = np.zeros((4, len(keys)), np.uint64)
    counters[0] = positions
    bits: npt.NDArray[np.float64] = (philox4x32(counters, keys)[0] >> np.uint64(8)).astype(np.float64)
    return np.multiply(bits + 0.5, 2.0**-24)
