"""Ranks compare what they have sampled two steps ago, which all have noted by then."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from pagewire.services.executor.devices.cuda.ranks.shared_page import PAGE, SharedPage


@pytest.fixture
def pages() -> Iterator[list[SharedPage]]:
    """The views of three ranks."""
    memory = os.memfd_create("page")
    os.ftruncate(memory, PAGE)
    yield [SharedPage(memory, rank, 3) for rank in range(3)]
    os.close(memory)


def test_equal_tokens_are_equal_whatever_rank_is_ahead(pages: list[SharedPage]) -> None:
    for step in range(30):
        for page in pages[1:]:
            page.note(np.array([step, 7]))
        pages[0].note(np.array([step, 7]))
        assert pages[0].differing_rank() is None


def test_the_rank_with_other_tokens_is_named(pages: list[SharedPage]) -> None:
    named = []
    for step in range(8):
        for rank, page in enumerate(pages):
            page.note(np.array([step, rank == 2 and step == 4]))
        named.append(pages[0].differing_rank())
    assert named == [None, None, None, None, None, None, 2, None]


def test_ranks_that_are_behind_do_not_differ(pages: list[SharedPage]) -> None:
    for step in range(10):
        for page in pages[1:]:
            if step >= 2:
                page.note(np.array([step - 2]))
        pages[0].note(np.array([step]))
        assert pages[0].differing_rank() is None
