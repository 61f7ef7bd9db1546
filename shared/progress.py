"""Progress bars on a terminal."""

import sys
from collections.abc import Collection, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def shown(items: Collection[T], text: str) -> Iterator[T]:
    """Yields the items, and draws a bar with the label `text` on standard error if that is a terminal."""
    yield from tqdm(items, text, leave=False, disable=None, file=sys.stderr)
