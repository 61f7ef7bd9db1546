"""Counts the tokens of an answer that are reasoning."""

from collections.abc import Sequence
from itertools import accumulate

from pagewire.shared.chat.formats import REASONING
from pagewire.shared.chat.parts import WHITE
from pagewire.shared.messages.client import ChatFormat


def reasoning_tokens(texts: Sequence[str], form: ChatFormat | None) -> int:
    """Returns how many of an answer's tokens, with the texts that each of them adds, are reasoning, tags included.

    >>> reasoning_tokens(["<think>", "Easy.", "</think>", "4"], ChatFormat(reasoning="think"))
    3
    """
    if form is None or not form.reasoning:
        return 0
    begin, end = REASONING[form.reasoning]
    text = "".join(texts)
    if not form.opened and not text.lstrip(WHITE).startswith(begin):
        return 0
    closed = text.find(end)
    if closed < 0:
        return len(texts)
    return 1 + sum(length < closed + len(end) for length in accumulate(map(len, texts)))
