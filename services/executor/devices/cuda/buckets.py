"""Shapes of steps that are captured as graphs; a step takes the smallest that holds it."""

from bisect import bisect_left
from typing import NamedTuple

from pagewire.shared.errors import ConfigurationError

LARGEST = 2048
"""Tokens of the largest captured step. Beyond it, launching kernels one by one takes less time than computing."""


class Bucket(NamedTuple):
    """The shape of a step, padding included."""

    rows: int
    tokens: int
    decode: bool
    """Whether every row has one token."""
    split: bool = True
    """Whether programs may share a context, as many as the batch leaves free."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the captured decode steps: at most 7 rows of padding, a tile of a matrix product or less."""
    return sorted({size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs} | {max_num_seqs})


def mixed_sizes(max_tokens: int) -> list[int]:
    """Tokens of the captured mixed steps: four sizes per octave from 16 on, so that at most a fifth is padding."""
    largest = min(max_tokens, LARGEST)
    ladder = (quarters << octave for octave in range(2, 10) for quarters in range(4, 8))
    return sorted({size for size in ladder if size < largest} | {largest})


class OneShape:
    """A single shape for every step, so that a row is computed alike whatever the others are."""

    def __init__(self, max_num_seqs: int, max_tokens: int) -> None:
        self._bucket = Bucket(min(max_num_seqs, max_tokens), max_tokens, decode=False, split=False)

    @property
    def captured(self) -> list[Bucket]:
        """See `Buckets.captured`."""
        return [self._bucket] if self._bucket.tokens <= LARGEST else []

    def choose(self, _rows: int, tokens: int) -> Bucket:
        """See `Buckets.choose`.

        Raises:
            ConfigurationError: the step is too large.
        """
        if tokens > self._bucket.tokens:
            raise ConfigurationError(
                f"a step of {tokens} tokens is larger than the one shape of batch-invariant: "
                "give max-num-batched-tokens of the scheduler to the executor too"
            )
        return self._bucket


class Buckets:
    """The captured shapes of a device with `max_num_seqs` slots and steps of usually up to `max_tokens` tokens."""

    def __init__(self, max_num_seqs: int, max_tokens: int) -> None:
        self._most_rows = max_num_seqs
        self._decode = decode_sizes(max_num_seqs)
        self._mixed = mixed_sizes(max_tokens)

    @property
    def captured(self) -> list[Bucket]:
        """Largest first, so that smaller graphs fit into the memory of larger ones."""
        mixed = [self._with(tokens) for tokens in reversed(self._mixed)]
        return mixed + [Bucket(rows, rows, decode=True) for rows in reversed(self._decode)]

    def choose(self, rows: int, tokens: int) -> Bucket:
        """The bucket of a step; one that is not captured, of exactly its tokens, if the step is too large."""
        if rows == tokens:
            size = self._decode[bisect_left(self._decode, rows)]
            return Bucket(size, size, decode=True)
        place = bisect_left(self._mixed, tokens)
        return self._with(self._mixed[place] if place < len(self._mixed) else tokens)

    def _with(self, tokens: int) -> Bucket:
        return Bucket(min(self._most_rows, tokens), tokens, decode=False)
