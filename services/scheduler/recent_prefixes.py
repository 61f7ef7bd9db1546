"""Which prefixes the KV pool holds, about: those that were computed here last, as many as fit into it."""

from collections import OrderedDict
from collections.abc import Sequence

from pagewire.shared.messages import pack
from pagewire.shared.prefix_hashes import DEPTH, SPAN, prefix_hashes

MOST = 8192
"""Prefixes that are told of at most: half a million tokens, in a message of 32 KiB."""


class RecentPrefixes:
    """The pool evicts the prefixes that were used least recently, and so does this, without asking the pool."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: positions of the pool; 0 where prefixes are not kept."""
        self._most = min(tokens // SPAN, MOST)
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def use(self, tokens: Sequence[int], salt: str = "") -> None:
        """A sequence of these tokens is computed here."""
        packed = pack(tokens[: SPAN * DEPTH])
        for number in reversed(prefix_hashes(packed, salt)):  # of one sequence, the longest prefix is evicted first
            self._hashes[number] = None
            self._hashes.move_to_end(number)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)

    def packed(self) -> bytes:
        """Their hashes, those used last at the end."""
        return pack(self._hashes)
