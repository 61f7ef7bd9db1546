"""Bars that show on a terminal how far something is."""

import sys
from collections.abc import Collection, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def shown(items: Collection[T], text: str) -> Iterator[T]:
    """Yields items and draws a bar on standard error meanwhile, if that is a terminal; `text` says what is done."""
    yield from tqdm(items, text, leave=False, disable=None, file=sys.stderr)
