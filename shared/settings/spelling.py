"""The word that somebody has probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches

CLOSE = 0.75
"""Similarity, from 0 to 1, from which on a word may be a misspelt other one."""


def nearest(word: str, words: Iterable[str], cutoff: float = CLOSE) -> str | None:
    """Returns the word that is most similar to a misspelt one, or that it abbreviates; None: there is no such word.

    >>> nearest("max-num-sqs", ["max-num-seqs", "model"]), nearest("gpu-mem", ["gpu-memory-utilization"])
    ('max-num-seqs', 'gpu-memory-utilization')
    >>> nearest("x", ["model"]) is None
    True
    """
    listed = list(words)
    close = get_close_matches(word, listed, n=1, cutoff=cutoff)
    longer = [other for other in listed if len(word) > 2 and other.startswith(word)]
    return next(iter(close or longer), None)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown word; empty if no other one is similar.

    >>> did_you_mean("srve", ["serve", "chat"])
    ': did you mean serve?'
    """
    other = nearest(word, words)
    return f": did you mean {other}?" if other is not None else ""
