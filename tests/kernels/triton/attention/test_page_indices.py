"""Every entry of a row is a block that its queries see, and the dummy block if the row is dead."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.attention_layer import Batch
from pagewire.kernels.triton.attention.page_indices import BLOCK, page_indices
from tests.kernels.triton.batches import DEVICE, int32
from tests.kernels.triton.references.page_indices import reference

DUMMY = 10**6
UNWRITTEN = -7


def check(rows: list[tuple[int, int, int]], window: int, block_size: int, width: int) -> list[int]:
    """`rows` are (entries, queries, length); a length of 0 is a dead row."""
    slots = torch.randperm(len(rows) + 2)[: len(rows)].int().to(DEVICE)
    tables = torch.arange((len(rows) + 2) * (width + 3), dtype=torch.int32, device=DEVICE).view(-1, width + 3)[
        :, :width
    ]
    starts, queries = [0], [0]
    for entries, count, _ in rows:
        starts.append(starts[-1] + entries)
        queries.append(queries[-1] + count)
    batch = Batch(slots, int32([length for _, _, length in rows]), int32(queries), tables)
    out = torch.full((starts[-1] + 5,), UNWRITTEN, dtype=torch.int32, device=DEVICE)
    page_indices(batch, int32(starts), window, DUMMY, block_size, out)
    indices = out.tolist()
    assert indices[: starts[-1]] == reference(batch, starts, window, DUMMY, block_size)
    assert set(indices[starts[-1] :]) == {UNWRITTEN}
    return indices


def test_rows_of_several_programs_list_their_own_blocks() -> None:
    entries = 2 * BLOCK + 3
    indices = check([(entries, 1, entries * 4 - 1), (1, 1, 2), (entries, 5, entries * 4)], 0, 4, entries)
    assert DUMMY not in indices


def test_a_dead_row_has_no_block_of_its_own() -> None:
    assert check([(2, 1, 17), (3, 1, 0), (1, 4, 4)], 0, 16, 4).count(DUMMY) == 3


@pytest.mark.parametrize(("window", "hidden"), [(0, 0), (1, 3), (4, 3), (5, 2), (8, 2), (9, 1), (100, 0)])
def test_blocks_behind_a_window_are_not_listed(window: int, hidden: int) -> None:
    """The query is at position 15, in the fourth block of four positions."""
    indices = check([(4, 1, 16)], window, 4, 6)[:4]
    assert indices[: hidden + 1] == [indices[hidden]] * (hidden + 1)
    assert len(set(indices)) == 4 - hidden


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_rows_equal_the_reference(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    rows = []
    for _ in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(1, 6 * block_size))
        dead = data.draw(st.booleans())
        rows.append((-(-length // block_size), data.draw(st.integers(1, length)), 0 if dead else length))
    check(rows, data.draw(st.integers(0, 40)), block_size, 6)
