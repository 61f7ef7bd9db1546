"""Philox's numbers in PyTorch, which the kernel is compared with."""


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
