"""Short hashes of prompt prefixes, with which schedulers tell tokenizers what they have cached.

The hashes are only hints for choosing a replica and may collide: inside a replica, prefixes are compared by token.
"""

from hashlib import blake2b

SPAN = 64
"""Number of tokens between two hashed prefixes. Computing a shorter prefix again costs a replica next to nothing."""
DEPTH = 256
"""Maximum number of hashed prefixes per prompt."""
_TOKEN_BYTES = 4
_HASH_BYTES = 4


def prefix_hashes(packed: bytes, salt: str = "") -> list[int]:
    """Returns 32-bit hashes of the prefixes of `SPAN`, 2 * `SPAN`, ... packed tokens, shortest first, at most `DEPTH`.

    The hashes depend on `salt`, since requests with different salts share no cache entries.

    >>> import numpy as np
    >>> tokens = np.arange(3 * SPAN + 10, dtype=np.int32)
    >>> hashes = prefix_hashes(tokens.tobytes())
    >>> len(hashes)
    3
    >>> hashes[:2] == prefix_hashes(tokens[: 2 * SPAN].tobytes())
    True
    """
    step = SPAN * _TOKEN_BYTES
    running = blake2b(salt.encode(), digest_size=_HASH_BYTES)
    hashes = []
    for end in range(step, min(len(packed), step * DEPTH) + 1, step):
        running.update(packed[end - step : end])
        hashes.append(int.from_bytes(running.copy().digest(), "little"))
    return hashes
