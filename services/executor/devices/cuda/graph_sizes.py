"""Shapes of steps that are captured as CUDA graphs; a step runs in the smallest bucket that holds it."""

from bisect import bisect_left
from typing import NamedTuple

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import SIZES_PER_OCTAVE

LARGEST = 2048
"""Tokens of the largest captured step. In a larger step, launching kernels one by one is faster than computing them."""


class Bucket(NamedTuple):
    """The shape of a step, padding included."""

    rows: int
    tokens: int
    decode: bool
    """Whether every row has one token."""
    split: bool = True
    """Whether several programs may share a context, depending on the batch."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Returns the rows of captured decode steps: at most 7 rows of padding, less than a tile of a product."""
    return sorted({size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs} | {max_num_seqs})


def mixed_sizes(max_tokens: int) -> list[int]:
    """Returns the tokens of captured mixed steps: four sizes per octave from 16 on, so at most a fifth is padding."""
    largest = min(max_tokens, LARGEST)
    ladder = (size << octave for octave in range(2, 10) for size in range(SIZES_PER_OCTAVE, 2 * SIZES_PER_OCTAVE))
    return sorted({size for size in ladder if size < largest} | {largest})


class OneShape:
    """A single shape for every step, so that the result for a row does not depend on the other rows."""

    def __init__(self, max_num_seqs: int, max_tokens: int, places: int) -> None:
        """A step samples at up to `places` places."""
        self._places = min(places, max_tokens)
        self._bucket = Bucket(min(max_num_seqs, max_tokens), max_tokens, decode=False, split=False)

    @property
    def captured(self) -> list[Bucket]:
        """The shape to capture; none if it is larger than `LARGEST`."""
        return [self._bucket] if self._bucket.tokens <= LARGEST else []

    @property
    def sampled(self) -> list[int]:
        """The places for which sampling is captured."""
        return [self._places for _ in self.captured]

    def places(self, _places: int) -> int:
        """Returns the places for which every step makes logits."""
        return self._places

    def choose(self, _rows: int, tokens: int) -> Bucket:
        """Returns the bucket of a step.

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
    """The captured shapes of a device with `max_num_seqs` slots. Most steps have up to `max_tokens` tokens."""

    def __init__(self, max_num_seqs: int, max_tokens: int, places: int, *, mixed: bool = True) -> None:
        """A step samples at up to `places` places. `mixed`: whether steps with rows of several tokens are captured
        too."""
        self._most_rows = max_num_seqs
        self._decode = decode_sizes(max_num_seqs)
        self._places = sorted({*self._decode, *decode_sizes(places)})
        self._mixed = mixed_sizes(max_tokens) if mixed else []

    @property
    def captured(self) -> list[Bucket]:
        """The buckets to capture, the largest first, so that smaller graphs reuse the memory of larger ones."""
        mixed = [self._with(tokens) for tokens in reversed(self._mixed)]
        return mixed + [Bucket(rows, rows, decode=True) for rows in reversed(self._decode)]

    @property
    def sampled(self) -> list[int]:
        """The places for which sampling is captured, the most first."""
        return self._places[::-1]

    def places(self, places: int) -> int:
        """Returns the places for which a step of so many `places` makes logits, of whatever bucket it is."""
        return self._places[bisect_left(self._places, places)]

    def choose(self, rows: int, tokens: int) -> Bucket:
        """Returns the bucket of a step; a step larger than all captured ones gets a bucket of exactly its tokens."""
        if rows == tokens:
            size = self._decode[bisect_left(self._decode, rows)]
            return Bucket(size, size, decode=True)
        place = bisect_left(self._mixed, tokens)
        return self._with(self._mixed[place] if place < len(self._mixed) else tokens)

    def _with(self, tokens: int) -> Bucket:
        return Bucket(min(self._most_rows, tokens), tokens, decode=False)
