"""Short hashes of the prefixes of a prompt, by which tokenizers and schedulers speak of what is cached where.

They are a hint for choosing a replica, and may collide: what is shared inside a replica is compared token by token.
"""

from hashlib import blake2b

SPAN = 64
"""Tokens from one hashed prefix to the next: what is shorter costs a replica next to nothing to compute again."""
DEPTH = 256
"""Prefixes that are hashed of one prompt at most."""
_TOKEN_BYTES = 4
_HASH_BYTES = 4


def prefix_hashes(packed: bytes, salt: str = "") -> list[int]:
    """32-bit hashes of the prefixes of `SPAN`, 2 * `SPAN`, ... packed tokens, the shortest first, at most `DEPTH`.

    Requests with different salts share nothing, so theirs differ.
    """
    step = SPAN * _TOKEN_BYTES
    running = blake2b(salt.encode(), digest_size=_HASH_BYTES)
    hashes = []
    for end in range(step, min(len(packed), step * DEPTH) + 1, step):
        running.update(packed[end - step : end])
        hashes.append(int.from_bytes(running.copy().digest(), "little"))
    return hashes
