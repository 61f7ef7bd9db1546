"""Outputs of earlier requests, by the salt of their prefix cache, as a text in which a drafter searches."""

from collections import OrderedDict, deque

import numpy as np

from pagewire.services.executor.devices.protocol import Int64

END = -1
"""Stands behind each output."""
SALT_TOKENS = 16384
"""Tokens of a salt's outputs that are kept, the last ones."""
MAX_SALTS = 64
"""Salts whose outputs are kept, the last ones that had any: 24 MiB in all."""
MOST_PLACES = 64
"""Places of a pair of tokens that are searched, the last ones."""
_BITS = 32
"""Bits of the second token of a pair, which is one number."""


class Outputs:
    """The last outputs of one salt, as one text.

    Attributes:
        tokens: [N] one output after the other, each with `END` behind it.
    """

    def __init__(self) -> None:
        self.tokens: Int64 = np.empty(0, np.int64)
        self._lengths: deque[int] = deque()  # of each output, with its end
        self._pairs: Int64 = np.empty(0, np.int64)  # [P] each token with the one before it in its output, ascending
        self._order: Int64 = np.empty(0, np.int64)  # [P] positions of these tokens, of equal pairs ascending

    def places(self, pair: Int64) -> Int64:
        """Returns the positions of the second token of a `pair` [2], ascending, where the first one is before it."""
        if len(pair) < 2:
            return self._order[:0]
        begin, end = np.searchsorted(self._pairs, (pair[0] << _BITS) + pair[1] + np.arange(2))
        return self._order[begin:end][-MOST_PLACES:]

    def add(self, output: Int64, most: int) -> None:
        """Keeps an output [N], and the last ones before it: `most` in all, and at most `SALT_TOKENS` tokens."""
        output = output[-(SALT_TOKENS - 1) :]
        self._lengths.append(len(output) + 1)
        total, dropped = len(self.tokens) + len(output) + 1, 0
        while len(self._lengths) > most or total - dropped > SALT_TOKENS:
            dropped += self._lengths.popleft()
        self.tokens = np.concatenate((self.tokens[dropped:], output, [END]))
        kept = self._order >= dropped
        pairs, order = self._pairs[kept], self._order[kept] - dropped
        added = (output[:-1] << _BITS) + output[1:]
        ascending = added.argsort(kind="stable")
        added, positions = added[ascending], ascending + len(self.tokens) - len(output)
        places = pairs.searchsorted(added, side="right")
        self._pairs, self._order = np.insert(pairs, places, added), np.insert(order, places, positions)


class EarlierOutputs:
    """Outputs by the salt of their prefix cache, which no two tenants and no two adapters share.

    So neither a draft nor the time that it saves tells a client what others have generated, as with cached prefixes.
    """

    def __init__(self, most: int) -> None:
        """`most` outputs are kept of each salt."""
        self._most = most
        self._by_salt: OrderedDict[str, Outputs] = OrderedDict()

    def of(self, salt: str) -> Outputs:
        """Returns the outputs with a salt."""
        return self._by_salt.get(salt, _NOTHING)

    def add(self, salt: str, output: Int64) -> None:
        """Keeps an output [N], and of other salts those that were added last."""
        if len(output):
            self._by_salt.setdefault(salt, Outputs()).add(output, self._most)
            self._by_salt.move_to_end(salt)
            if len(self._by_salt) > MAX_SALTS:
                self._by_salt.popitem(last=False)


_NOTHING = Outputs()
