"""Drafters that guess the next tokens of a text from what has followed the same tokens earlier."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from pagewire.services.executor.devices.protocol import Int64
from pagewire.services.executor.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftRow, NewSequence
from pagewire.services.executor.speculation.earlier_outputs import END, EarlierOutputs

FEW = 6
"""Number of places that are compared one by one, which is faster than all at once."""
VOTES = 16
"""Number of earlier places, the last ones, whose next tokens are compared."""


class Match(NamedTuple):
    """The places of an earlier text that agree with the end of a text."""

    places: list[int]
    """Positions of the tokens that equal the last one, ascending."""
    length: int
    """Number of tokens up to each of them that equal those at the end."""


def longest_match(earlier: Int64, text: Int64, most: int, places: Int64 | None = None) -> Match:
    """Returns the places of the `earlier` text [E] whose last tokens agree with the end of the `text` [N] in as many
    tokens as any, up to `most`. Only `places` [P], ascending, are compared; None: all.

    >>> text = np.array([7, 8, 9, 1, 8, 9, 2, 8, 9])
    >>> longest_match(text[:-1], text, most=5)
    Match(places=[2, 5], length=2)
    """
    last = len(text) - 1
    if places is None:
        places = np.flatnonzero(earlier == text[last])
    length = 1
    while len(places) > FEW and length < min(most, last + 1):
        reaching = places[places >= length]
        longer = reaching[earlier[reaching - length] == text[last - length]]
        if not len(longer):
            return Match(places.tolist(), length)
        places, length = longer, length + 1
    lengths = [(_agreeing(earlier, text, place, length, most), place) for place in places.tolist()]
    longest = max((length for length, _ in lengths), default=0)
    return Match([place for length, place in lengths if length == longest], longest)


def _agreeing(earlier: Int64, text: Int64, place: int, length: int, most: int) -> int:
    """Returns how many tokens up to a place, up to `most`, agree with the end of a text; `length` are known to."""
    last, most = len(text) - 1, min(most, place + 1, len(text))
    while length < most and earlier[place - length] == text[last - length]:
        length += 1
    return length


def following(text: Int64, place: int, count: int) -> list[int]:
    """Returns the `count` tokens behind a `place` of the `text` [N]; at its end, the text goes on as it did there.

    >>> following(np.array([5, 6, 7, 6, 7]), place=2, count=5)
    [6, 7, 6, 7, 6]
    """
    behind: list[int] = text[place + 1 : place + 1 + count].tolist()
    return (behind * -(-count // len(behind)))[:count]


@dataclass(frozen=True, slots=True)
class NgramDrafter(Drafter):
    """Repeats what followed the last place that agrees with the end of the text: prompt lookup."""

    shortest: int
    """Least number of tokens that must agree."""
    longest: int
    """Number of tokens that are compared at most."""

    @override
    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [self._draft(row.text, row.room) for row in rows]

    def _draft(self, text: Int64, most: int) -> Draft:
        places, length = longest_match(text[:-1], text, self.longest)
        if most < 1 or length < self.shortest or not places:
            return NO_DRAFT
        tokens = following(text, places[-1], most)
        return Draft(tokens, [1.0] * len(tokens), length)


class SuffixDrafter(Drafter):
    """Drafts, position by position, the token that most often followed the longest matching suffix: in the sequence
    itself, or in earlier outputs of the same salt where more tokens match there.

    Source: SuffixDecoding (Oliaro et al., 2024). The places that agree with the longest end of the text are the node of
    such a tree, and those among them that go on with a token are its child.
    """

    def __init__(self, depth: int, factor: float, least_share: float, outputs: EarlierOutputs | None = None) -> None:
        """
        Args:
            depth: number of tokens that are compared at most.
            factor: tokens of a draft per token that agrees, at most.
            least_share: a draft ends where the product of its shares is less.
            outputs: texts that were generated earlier; None: only the text itself is searched.
        """
        self._depth = depth
        self._factor = factor
        self._least_share = least_share
        self._outputs = outputs
        self._sequences: dict[int, NewSequence] = {}

    @override
    def begin(self, slot: int, sequence: NewSequence) -> None:
        self._sequences[slot] = sequence

    @override
    def end(self, slot: int, text: Int64) -> None:
        sequence = self._sequences.pop(slot)
        if self._outputs is not None:
            self._outputs.add(sequence.cache_salt, text[sequence.known_tokens :])

    @override
    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [self._draft(row) for row in rows]

    def _draft(self, row: DraftRow) -> Draft:
        own = longest_match(row.text[:-1], row.text, self._depth)
        if self._outputs is not None:
            outputs = self._outputs.of(self._sequences[row.slot].cache_salt)
            others = longest_match(outputs.tokens, row.text, self._depth, outputs.places(row.text[-2:]))
            if others.length > own.length:
                count = self._count(row, others)
                ends = [outputs.tokens[place + 1 : place + 1 + count].tolist() for place in others.places[-VOTES:]]
                return voted([_before_end(tokens) for tokens in ends], self._least_share, others.length)
        count = self._count(row, own)
        if not own.places or count < 1:
            return NO_DRAFT
        texts = [following(row.text, place, count) for place in own.places[-VOTES:]]
        return voted(texts, self._least_share, own.length)

    def _count(self, row: DraftRow, match: Match) -> int:
        return max(min(row.room, int(self._factor * match.length)), 0)


def _before_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END)] if END in tokens else tokens


def voted(texts: list[list[int]], least_share: float, length: int) -> Draft:
    """Returns the draft on which the most `texts` agree, token by token; the last ones win where the numbers are equal.

    >>> voted([[5, 6], [5, 7, 8], [4]], least_share=0.1, length=3).tokens
    [5, 7, 8]
    """
    tokens: list[int] = []
    shares: list[float] = []
    product = 1.0
    while texts := [text for text in texts if len(text) > len(tokens)]:
        index = len(tokens)
        if len(texts) == 1:
            tokens = texts[0]
            shares += [1.0] * (len(tokens) - index)
            break
        votes = Counter(text[index] for text in reversed(texts))
        token, number = votes.most_common(1)[0]
        share = number / len(texts)
        product *= share
        if product < least_share:
            break
        tokens.append(token)
        shares.append(share)
        texts = [text for text in texts if text[index] == token]
    return Draft(tokens, shares, length)
