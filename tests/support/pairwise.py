"""Small sets of settings in which every pair of values occurs."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows over `axes` such that any two values of two axes meet in at least one. Greedy, the same each time."""
    names = list(axes)
    every = [dict(zip(names, values, strict=True)) for values in product(*axes.values())]
    missing = {pair for row in every for pair in _pairs(row)}
    rows = []
    while missing:
        best = max(every, key=lambda row: len(missing.intersection(_pairs(row))))
        missing.difference_update(_pairs(best))
        rows.append(best)
    return rows


def _pairs(row: dict[str, Any]) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    return list(combinations(row.items(), 2))
