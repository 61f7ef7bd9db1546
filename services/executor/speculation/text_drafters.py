"""Drafters that guess the next tokens of a text from what has followed the same tokens earlier in it."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from pagewire.services.executor.devices.protocol import Int64
from pagewire.services.executor.speculation.drafter import NO_DRAFT, Draft, TextDrafter

VOTES = 16
"""Number of earlier places, the last ones, whose next tokens are compared."""


class Match(NamedTuple):
    """The earlier places of a text that agree with its end."""

    places: Int64
    """[P] positions of the tokens that equal the last one, ascending."""
    length: int
    """Number of tokens up to each of them that equal those at the end."""


def longest_match(text: Int64, most: int) -> Match:
    """Returns the places whose last tokens agree with the end of the `text` [N] in as many tokens as any, up to `most`.

    >>> places, length = longest_match(np.array([7, 8, 9, 1, 8, 9, 2, 8, 9]), most=5)
    >>> places.tolist(), length
    ([2, 5], 2)
    """
    last = len(text) - 1
    places, length = np.flatnonzero(text[:last] == text[last]), 0
    longer = places
    while len(longer) and length < most:
        places, length = longer, length + 1
        reaching = places[places >= length] if places[0] < length else places
        longer = reaching[text[reaching - length] == text[last - length]] if length <= last else reaching[:0]
    return Match(places, length)


def following(text: Int64, place: int, count: int) -> list[int]:
    """Returns the `count` tokens behind a `place` of the `text` [N]; at its end, the text goes on as it did there.

    >>> following(np.array([5, 6, 7, 6, 7]), place=2, count=5)
    [6, 7, 6, 7, 6]
    """
    behind: list[int] = text[place + 1 : place + 1 + count].tolist()
    return (behind * -(-count // len(behind)))[:count]


@dataclass(frozen=True, slots=True)
class NgramDrafter(TextDrafter):
    """Repeats what followed the last place that agrees with the end of the text: prompt lookup."""

    shortest: int
    """Least number of tokens that must agree."""
    longest: int
    """Number of tokens that are compared at most."""

    @override
    def continued(self, text: Int64, most: int) -> Draft:
        places, length = longest_match(text, self.longest)
        if length < self.shortest or not len(places):
            return NO_DRAFT
        tokens = following(text, int(places[-1]), most)
        return Draft(tokens, [1.0] * len(tokens), length)


@dataclass(frozen=True, slots=True)
class SuffixDrafter(TextDrafter):
    """Follows the most frequent token, place by place, as suffix decoding does in its tree of the request.

    Source: SuffixDecoding (Oliaro et al., 2024). The places that agree with the longest end of the text are the node of
    that tree, and those among them that go on with a token are its child.
    """

    depth: int
    """Number of tokens that are compared at most."""
    factor: float
    """Tokens of a draft per token that agrees, at most."""
    least_share: float
    """A draft ends where the product of its shares is less."""

    @override
    def continued(self, text: Int64, most: int) -> Draft:
        places, length = longest_match(text, self.depth)
        count = min(most, int(self.factor * length))
        if not len(places) or count < 1:
            return NO_DRAFT
        return voted(text, places[-VOTES:], count, self.least_share, length)


def voted(text: Int64, places: Int64, count: int, least_share: float, length: int) -> Draft:
    """Returns the draft on which the most `places` [P] of the `text` [N] agree, token by token."""
    texts = [following(text, place, count) for place in places.tolist()]
    tokens: list[int] = []
    shares: list[float] = []
    product = 1.0
    for index in range(count):
        if len(texts) == 1:
            tokens += texts[0][index:]
            shares += [1.0] * (count - index)
            break
        votes = Counter(each[index] for each in reversed(texts))  # the last place wins where the numbers are equal
        token, number = votes.most_common(1)[0]
        share = number / len(texts)
        product *= share
        if product < least_share:
            break
        tokens.append(token)
        shares.append(share)
        texts = [each for each in texts if each[index] == token]
    return Draft(tokens, shares, length)
