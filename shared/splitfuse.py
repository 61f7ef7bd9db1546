"""Dynamic SplitFuse: what one step computes. Shared by the executor, which obeys it, and whoever predicts it.

Source: DeepSpeed-FastGen (Holmes et al., 2024). Long prompts are split over steps and short ones fused, so that every
step has the same number of tokens; decoding rows always come first and are never delayed by a prompt.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Pending(NamedTuple):
    """What a slot could compute next."""

    slot: int
    """Row in the executor's tables."""
    remaining: int
    """Known tokens whose KV is not written: 1 is a decode, more is a prompt. Not negative."""
    room: int
    """Positions that the slot's limit still allows. Not negative."""


class Row(NamedTuple):
    """A part of one step."""

    slot: int
    width: int
    """Positions to compute, at least 1."""


def compose(pending: Iterable[Pending], budget: int) -> list[Row]:
    """The rows of one step: every decode, then prompt chunks in the given order until `budget` tokens are reached.

    A slot without work or at its limit is skipped and delays nobody. The budget is filled exactly unless work runs out.
    """
    decodes: list[Row] = []
    prompts: list[Pending] = []
    for entry in pending:
        if entry.remaining == 0 or entry.room == 0:
            continue
        if entry.remaining == 1:
            decodes.append(Row(entry.slot, 1))
        else:
            prompts.append(entry)
    rows = decodes[:budget]
    left = budget - len(rows)
    for entry in prompts:
        if left == 0:
            break
        width = min(entry.remaining, entry.room, left)
        rows.append(Row(entry.slot, width))
        left -= width
    return rows
