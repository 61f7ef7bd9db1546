"""The prefixes that the KV pool holds, approximately: the last ones computed, as many as fit into it."""

from collections import OrderedDict
from collections.abc import Sequence

from pagewire.shared.messages import pack
from pagewire.shared.prefix_hashes import DEPTH, SPAN, prefix_hashes

MAX_PREFIXES = 8192
"""Prefixes that are advertised at most: half a million tokens, in a message of 32 KiB."""


class RecentPrefixes:
    """Hashes of the last prefixes used. Like the pool, it evicts the least recently used, without asking the pool."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: positions of the pool; 0 where prefixes are not kept."""
        self._capacity = min(tokens // SPAN, MAX_PREFIXES)
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def add(self, tokens: Sequence[int], salt: str = "") -> None:
        """Records that a sequence of these tokens is computed here."""
        packed = pack(tokens[: SPAN * DEPTH])
        for number in reversed(prefix_hashes(packed, salt)):  # of one sequence, the longest prefix is evicted first
            self._hashes[number] = None
            self._hashes.move_to_end(number)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)

    def packed(self) -> bytes:
        """Returns the packed hashes, the last used at the end."""
        return pack(self._hashes)
